"""autoscaler: heartbeats and metrics in, decisions out; decisions and outcomes in, records out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from record_factories import version
from role_graph import RoleGraph

from operators.autoscaler.config import AutoscalingConfig
from schemas.records import Metric, ReplicaStatus, ScalingDecision, ScalingOutcome
from schemas.topics import DECISION, METRICS, OUTCOME, PLACEMENT, REPLICAS, SCALING

Graph = Callable[..., RoleGraph]
BEAT = ReplicaStatus(0, 0, 1, "running", version(0), 9, 0, 9, 0, 9, 0, 0.0, "host", 1, 0)
WAITING = Metric(PLACEMENT, 1, {"waiting": 90.0}, 0)


def test_scale_rollouts_decides_by_the_load(graph: Graph) -> None:
    config = AutoscalingConfig("queue", observe_s=1e-9, stable_s=1e-9, cooldown_s=1e-9)
    decided: list[Any] = graph("autoscaler").fold(
        "scale rollouts", [(METRICS, WAITING), (REPLICAS, BEAT)], [], [], config=config
    )
    decisions = [each for each in decided if isinstance(each, ScalingDecision)]
    assert [(each.before, each.target, each.reason) for each in decisions[:1]] == [
        (1, 5, "11.00 requests a slot, above 1")
    ]
    metrics = [each for each in decided if isinstance(each, Metric)]
    assert metrics[0].values["running"] == 1


def test_report_decisions_writes_decisions_outcomes_and_metrics(graph: Graph) -> None:
    decision = ScalingDecision(1, "queue", 1, 1, 2, "full", False, 5)
    outcome, metric = ScalingOutcome(1, "local", 2, "", 3.0, 8), Metric("autoscaler", 1, {"running": 2.0}, 8)
    outputs = graph("autoscaler").map("report decisions", decision, outcome, metric)
    assert [(each.topic, each.key, each.record) for each in outputs] == [
        (SCALING, DECISION, decision),
        (SCALING, OUTCOME, outcome),
        (METRICS, "autoscaler", metric),
    ]
    assert replace(decision, dry_run=True) != decision
