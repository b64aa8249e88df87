"""Schedules `partial_rollout` and `synchronous`, and `refresh = "slot"`, in whole runs on the transformers engine."""

from __future__ import annotations

import pytest
from laminar_runs import StartRun
from small_runs import COMPACT

from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from infra.kafka.topic_reader import read_topic
from pipelines.inspect.metrics_file import read_metrics
from pipelines.present.report.series import batches, staleness_histogram
from schemas.records import Trajectory
from schemas.topics import TRAJECTORIES

TRAINED = 8 * 16


@pytest.fixture
def generated(
    request: pytest.FixtureRequest, start_run: StartRun, broker: Broker, run_id: str
) -> tuple[list[Trajectory], dict[int, int]]:
    """The trajectories of a run with the parameter's settings, and the histogram of their staleness at training."""
    servers = broker.bootstrap_servers
    changes = (
        COMPACT,
        *request.param.split(),
        "experience.max_staleness=3",
        "prompts.max_new_tokens=48",
    )
    run = start_run(run_id, f"kafka.bootstrap_servers={servers}", *changes)
    assert run.wait(150) == 0, run.output()
    audit = run.audit()
    assert audit["passed"]
    assert (audit["trained"], audit["lost"], audit["trained_twice"]) == (TRAINED, 0, 0)
    metrics = read_metrics(run.folder / "metrics.jsonl")
    assert len(batches(metrics)) == 8
    records = read_topic(ClientProperties.at(servers), TRAJECTORIES.name(run.name))
    rows = (row for record in records for row in record.rows if isinstance(row, Trajectory))
    return [row for row in rows if row.prompt.purpose == "train"], staleness_histogram(metrics)


@pytest.mark.parametrize("generated", ["placement.schedule=partial_rollout"], indirect=True)
def test_partial_rollout_records_the_version_of_each_token(
    generated: tuple[list[Trajectory], dict[int, int]],
) -> None:
    trajectories, _ = generated
    for each in trajectories:
        assert sum(span.length for span in each.version_spans) == len(each.response.token_ids)
        versions = [span.version for span in each.version_spans]
        assert versions == sorted(set(versions))
    assert any(len(each.version_spans) > 1 for each in trajectories)


@pytest.mark.parametrize("generated", ["placement.schedule=synchronous"], indirect=True)
def test_synchronous_schedule_trains_on_newest_weights(
    generated: tuple[list[Trajectory], dict[int, int]],
) -> None:
    trajectories, staleness = generated
    assert all(len(each.version_spans) == 1 for each in trajectories)
    assert staleness == {0: TRAINED}


SLOTS = "placement.refresh=slot placement.replica_batch=16 rollout.slots=4"


@pytest.mark.parametrize("generated", [SLOTS], indirect=True)
def test_slots_generate_each_trajectory_under_one_version(
    generated: tuple[list[Trajectory], dict[int, int]],
) -> None:
    """That a replica runs two versions at once depends on times, so a simulated run shows it (test_slots.py)."""
    trajectories, _ = generated
    assert {len(each.version_spans) for each in trajectories} == {1}
    assert len({each.version_spans[0].version for each in trajectories}) > 1
