"""The metrics that several experience shards report for a batch, merged into one."""

from __future__ import annotations

from pipelines.inspect.run_state.buffers import merge_shards
from pipelines.inspect.run_state.state import fold_all, new_run
from pipelines.present.report.series import newest_by_step, staleness_histogram
from schemas.metric_labels import labelled
from schemas.records import Metric

COUNT, MEAN = labelled("trajectories", task="sums"), labelled("reward/mean", task="sums")
FIRST = {"staleness/0": 3.0, COUNT: 3.0, MEAN: 1.0, "curriculum/level": 2.0, "shard": 0.0}
SECOND = {"staleness/0": 1.0, "staleness/1": 4.0, COUNT: 1.0, MEAN: 0.0, "shard": 1.0}


def test_shard_values_add_counts_and_weight_means() -> None:
    assert merge_shards([FIRST, SECOND]) == {
        "staleness/0": 4.0,
        "staleness/1": 4.0,
        COUNT: 4.0,
        MEAN: 0.75,
        "curriculum/level": 2.0,
    }
    assert merge_shards([{"dropped": 2.0}]) == {"dropped": 2.0}
    old = [{"trajectories/sums": each[COUNT], "reward/mean/sums": each[MEAN]} for each in (FIRST, SECOND)]
    assert merge_shards(old) == {"trajectories/sums": 4.0, "reward/mean/sums": 0.75}  # as release 0.2.0 wrote them


def test_shard_components_weigh_by_their_trajectories() -> None:
    mean, count = (labelled(f"component/{name}", component="format") for name in ("mean", "trajectories"))
    shards = [{mean: 1.0, count: 3.0}, {mean: 0.0, count: 1.0}, {"dropped": 1.0}]
    assert merge_shards(shards) == {mean: 0.75, count: 4.0, "dropped": 1.0}


def test_newest_record_of_each_shard_counts() -> None:
    metrics = [
        Metric("experience", 0, {"staleness/0": 9.0, "shard": 0.0}, 1),
        Metric("experience", 0, SECOND, 2),
        Metric("experience", 0, FIRST, 3),
    ]
    assert staleness_histogram(metrics) == {0: 4, 1: 4}
    assert [metric.values[COUNT] for metric in newest_by_step(metrics, "experience")] == [4.0]
    assert fold_all(new_run("r", None, 0), metrics).experience[COUNT] == 4.0
