"""The metric that the buffer writes with each batch."""

from __future__ import annotations

from buffer_harness import Buffer
from record_factories import experience, prompt, trajectory, version

from schemas.records import RewardComponent
from schemas.topics import METRICS


def test_metric_of_a_batch_has_what_the_buffer_holds() -> None:
    buffer = Buffer(global_batch=2, max_staleness=1, over_age="drop")
    buffer.publish(5)
    buffer.group(0, under=version(5))
    buffer.group(2, under=version(3))
    buffer.score(experience(trajectory(prompt(4), 0, under=version(5))))
    buffer.shard.run()
    (metric,) = buffer.log.rows(METRICS)
    assert metric.values == {
        "batches": 1.0,
        "buffer/trajectories": 1.0,
        "buffer/groups": 1.0,
        "dropped_stale": 2.0,
        "dropped": 2.0,
        "over_age": 0.0,
        "staleness/0": 2.0,
        "staleness_at_finish/0": 2.0,
        'trajectories{task="chain_sum"}': 2.0,
        'reward/mean{task="chain_sum"}': 1.0,
        'response_length/mean{task="chain_sum"}': 2.0,
    } | {f"dropped_share/{decile}": 0.5 for decile in range(1, 11)}
    assert buffer.batches() == [("p0.0", "p0.1")]


def test_metric_of_a_batch_has_the_means_of_components() -> None:
    buffer = Buffer(global_batch=4)
    question = prompt(0)
    right = (
        RewardComponent("exact", 1.0, 1.0),
        RewardComponent("brief", 0.5, 0.0),
        RewardComponent("accuracy", 1.0, 0.0),
    )
    brief = (RewardComponent("brief", 0.25, 0.0),)  # the other reward raised an error
    large = tuple(RewardComponent(name, 1.7e308, 0.0) for name in ("brief", "exact", "accuracy"))  # imported
    buffer.score(
        *(experience(trajectory(question, n), components=each) for n, each in enumerate((right, brief, large, large)))
    )
    buffer.shard.run()
    (metric,) = buffer.log.rows(METRICS)
    assert {name: value for name, value in metric.values.items() if name.startswith("component/")} == {
        'component/mean{component="brief"}': 0.375,
        'component/trajectories{component="brief"}': 2.0,
        'component/mean{component="exact"}': 1.0,
        'component/trajectories{component="exact"}': 1.0,
    }
    assert metric.values['accuracy/mean{task="chain_sum"}'] == 1.0
