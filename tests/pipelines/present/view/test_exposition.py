"""The Prometheus metrics of a run, the Grafana dashboard, and `laminar watch` as JSON and on a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from record_samples import SAMPLES

from pipelines.inspect.audit.result import FINDINGS
from pipelines.inspect.run_state.events import LagMeasured
from pipelines.inspect.run_state.state import RunState, fold_all, new_run
from pipelines.present.view.exposition import RunCollector, metric_name
from pipelines.present.view.grafana import PANELS, dashboard
from pipelines.present.view.state_json import state_to_json
from schemas import records as r

DEPLOY = Path(__file__).parents[4] / "infra" / "deploy"


HELD_OUT = {"accuracy/greedy": 0.75, "accuracy/sampled": 0.5, 'accuracy/greedy{task="sums"}': 1.0}


AUDIT = {"passed": 1, "ended_at": 1_700_000_000.5, **dict.fromkeys(FINDINGS, 0)}


@pytest.fixture
def state() -> RunState:
    values = {
        "reward/mean": 0.5,
        "staleness/mean": 1.0,
        "staleness/max": 2.0,
        "trajectories": 64.0,
        "time/update": 0.25,
    }
    status, relay, version = (SAMPLES[kind] for kind in (r.ReplicaStatus, r.RelayStatus, r.WeightVersion))
    assert isinstance(status, r.ReplicaStatus)
    assert isinstance(relay, r.RelayStatus)
    assert isinstance(version, r.WeightVersion)
    events = [
        r.Metric("trainer", 3, values, 1_700_000_000_000),
        r.Metric("evaluation", 3, HELD_OUT, 1_700_000_000_000),
        r.Metric("score", 0, {"trajectories": 4.0, "reward_errors": 1.0}, 1_700_000_000_000),
        status,
        replace(status, replica=1, waiting=0),
        relay,
        version,
        LagMeasured({"batches": 3}),
    ]
    return fold_all(new_run("first", None, 0), events)


def scrape(state: RunState, audit: Mapping[str, float] = MappingProxyType({})) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(RunCollector(lambda: state, lambda: audit))
    lines = generate_latest(registry).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_run_collector_labels_run_and_units(state: RunState) -> None:
    found = scrape(state)
    assert found['laminar_optimizer_step{run="first"}'] == 3
    assert found['laminar_trajectories_trained_total{run="first"}'] == 64
    assert {name: value for name, value in found.items() if "heldout" in name} == {
        'laminar_heldout_accuracy{mode="greedy",run="first"}': 0.75,
        'laminar_heldout_task_accuracy{mode="greedy",run="first",task="sums"}': 1.0,
        'laminar_heldout_accuracy{mode="sampled",run="first"}': 0.5,
    }
    assert found['laminar_lag_records{run="first",topic="batches"}'] == 3
    assert found['laminar_replica_requests_waiting{replica="1",run="first"}'] == 0
    assert found['laminar_relay_received_bytes_total{relay="0",run="first"}'] == 2560
    assert found['laminar_trainer_time_update_seconds{run="first"}'] == 0.25
    assert all('run="first"' in name for name in found)


def test_run_collector_has_the_last_audit_and_its_time(state: RunState) -> None:
    found = scrape(state, AUDIT)
    assert found['laminar_audit_passed{run="first"}'] == 1
    assert found['laminar_audit_timestamp_seconds{run="first"}'] == 1_700_000_000.5
    assert found['laminar_audit_findings{finding="lost",run="first"}'] == 0


def test_help_texts_name_the_value_and_its_unit(state: RunState) -> None:
    steps = r.Metric("steps/placement", 1, {"moved/repack": 2.0, "time/plan moves": 0.5, "new": 1.0}, 1)
    other = r.Metric("score", 1, {"new": 1.0}, 1)
    registry = CollectorRegistry()
    registry.register(RunCollector(lambda: fold_all(state, [steps, other])))
    lines = generate_latest(registry).decode().splitlines()
    helps = dict(line.split(" ", 3)[2:] for line in lines if line.startswith("# HELP"))
    assert helps["laminar_trainer_reward_mean"] == "Mean reward of the last batch."
    assert helps["laminar_trainer_time_update_seconds"] == "Time of the last update, in seconds."
    shard = "by role and shard, since the start of the shard."
    assert helps["laminar_steps_moved_total"] == f"Trajectories moved to another replica by reason, {shard}"
    assert helps["laminar_steps_time_seconds_total"] == f"Time spent by phase, in seconds, {shard}"
    listed = "docs/evaluation.md and docs/training.md list the metrics."
    assert helps["laminar_score_new"] == f"new of score; {listed}"
    assert helps["laminar_steps_new_total"] == f"new, {shard}"


def test_run_collector_has_the_counters_of_steps(state: RunState) -> None:
    values = {"moved/repack": 2.0, "bytes": 5.0, "read/progress": 7.0, "time/plan moves": 0.5}
    found = scrape(fold_all(state, [r.Metric("steps/placement", 1, values, 1)]))
    labels = 'role="placement",run="first",shard="1"'
    assert {name: value for name, value in found.items() if name.startswith("laminar_steps_")} == {
        f'laminar_steps_bytes_total{{reason="",{labels}}}': 5.0,
        f'laminar_steps_moved_total{{reason="repack",{labels}}}': 2.0,
        f'laminar_steps_read_total{{{labels},topic="progress"}}': 7.0,
        f'laminar_steps_time_seconds_total{{phase="plan moves",{labels}}}': 0.5,
    }
    (steps,) = state_to_json(fold_all(state, [r.Metric("steps/placement", 1, values, 1)]))["steps"].items()
    assert steps == ("placement-1", values)


@pytest.mark.parametrize("key", ['reward/mean{task="my \\"sums\\""}', 'reward/mean/my "sums"'])
def test_run_collector_has_tasks_as_labels(state: RunState, key: str) -> None:
    values = {key: 0.5, "buffer/groups": 3.0}
    found = scrape(fold_all(state, [r.Metric("experience", 1, values, 1)]))
    assert {name: value for name, value in found.items() if name.startswith("laminar_experience")} == {
        'laminar_experience_buffer_groups{run="first"}': 3.0,
        'laminar_experience_reward_mean{run="first",task="my \\"sums\\""}': 0.5,
    }


def test_run_collector_has_no_sum_beside_its_tasks(state: RunState) -> None:
    values = {"trajectories": 5.0, 'trajectories{task="sums"}': 3.0, 'trajectories{task="gcd"}': 2.0, "episodes": 1.0}
    found = scrape(fold_all(state, [r.Metric("score", 1, values, 1)]))
    assert {name: value for name, value in found.items() if name.startswith("laminar_score_")} == {
        'laminar_score_trajectories{run="first",task="sums"}': 3.0,
        'laminar_score_trajectories{run="first",task="gcd"}': 2.0,
        'laminar_score_episodes{run="first"}': 1.0,
    }
    assert not [name for name in found if 'task=""' in name]


def test_run_collector_of_new_run() -> None:
    assert scrape(new_run("first", None, 0)) == {
        'laminar_optimizer_step{run="first"}': 0,
        'laminar_weight_versions_total{run="first"}': 0,
    }


@pytest.mark.parametrize(
    ("stage", "name", "expected"),
    [
        ("trainer", "reward/mean", "trainer_reward_mean"),
        ("trainer", "weight_sync/seconds", "trainer_weight_sync_seconds"),
        ("experience", "staleness/0", "experience_staleness_0"),
        ("trainer", "clip_ratio/low", "trainer_clip_ratio_low"),
    ],
)
def test_metric_name_has_stage_and_unit(stage: str, name: str, expected: str) -> None:
    assert metric_name(stage, name) == expected


def test_grafana_dashboard_uses_existing_metrics(state: RunState) -> None:
    names = {name.partition("{")[0] for name in scrape(state, AUDIT)}
    for panel in PANELS:
        for expression, _ in panel.queries:
            assert set(re.findall(r"laminar_\w+", expression)) <= names, panel.title
    written = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    assert written == dashboard(), "out of date: `make generated`"


def test_state_to_json(state: RunState) -> None:
    found = json.loads(json.dumps(state_to_json(state)))
    assert (found["reward"], found["heldout"], found["lag"]) == (0.5, 0.75, {"batches": 3})
    assert found["replicas"]["0"]["running"] == 8
    assert state_to_json(new_run("first", None, 0))["reward"] is None
