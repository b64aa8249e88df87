"""autoscaler: it observes the load of a run, and decides how many rollout processes there are."""

from __future__ import annotations

import apache_beam as beam

from infra.deploy.plan import resource_prefix
from operators.autoscaler.actuators import Actuator, Command, LocalFleet
from operators.autoscaler.config import AutoscalingConfig
from operators.autoscaler.kubernetes import StatefulSetScale
from operators.autoscaler.load import TRAINER
from operators.autoscaler.scale_rollouts import ReportDecisions, ScaleRollouts
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from pipelines.config import Config
from pipelines.shards import shard_config, topic_input
from schemas.topics import DECISION, METRICS, PAUSE, PLACEMENT, REPLICAS, SCALING, SETTLED


def build(pipeline: beam.Pipeline, config: Config) -> None:
    """Consumes metrics, heartbeats, settled and its own decisions; produces scaling and metrics."""
    source = shard_config(
        config,
        "autoscaler",
        topic_input(config, METRICS, start="latest", keys=(TRAINER, PAUSE, PLACEMENT)),
        topic_input(config, REPLICAS, start="latest", keys=("rollout-", "relay-")),
        topic_input(config, SETTLED, start="latest"),
        topic_input(config, SCALING, keys=(DECISION,)),
        owned=((SCALING, (0,)),),
        slow_poll=True,
        slow_commit=True,
    )
    scaling = config.autoscaling or AutoscalingConfig()
    scale = ScaleRollouts(
        scaling,
        _actuator(config, scaling),
        config.rollout.processes,
        scaling.most(config.rollout.replicas, config.inboxes),
        config.placement.heartbeat_timeout_s,
    )
    (
        pipeline
        | "read load and decisions" >> ReadTopics(source)
        | "scale rollouts" >> FoldRecords(scale, "observe load", "decide target", "carry out decisions")
        | "report decisions" >> ReportDecisions()
        | "write decisions, dead letters" >> WriteTransactionally(source)
    )


def _actuator(config: Config, scaling: AutoscalingConfig) -> Actuator:
    match scaling.actuator:
        case "local":
            return LocalFleet()
        case "command":
            return Command(config.run.name, scaling.command)
        case "kubernetes":
            name = scaling.kubernetes_name or f"{resource_prefix(config.run.name)}-rollout"
            return StatefulSetScale(config.deploy.namespace, name)
