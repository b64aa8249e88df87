"""rollout: the replicas of this process consume assignments and produce trajectories."""

from __future__ import annotations

from dataclasses import replace

import apache_beam as beam

from infra.models.chat import MessageFrame, message_frame
from operators.io.config import TopicInput
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.repartition import RepartitionTrajectories
from operators.io.write_transactionally import WriteTransactionally
from operators.rollout.backend import BackendSpec, EmulatedSpec, TransformersSpec, VllmSpec
from operators.rollout.generate_trajectories import GenerateTrajectories
from operators.rollout.report_events import ReportEvents
from pipelines.config import Config
from pipelines.shards import newest_manifests, shard_config, store_folder, topic_input
from schemas.topics import INBOX, PROGRESS, RELAY, TRAJECTORIES


def build(pipeline: beam.Pipeline, config: Config, process: int = 0) -> None:
    """Consumes inbox and relay; produces trajectories, progress, inbox (hand-over) and heartbeats."""
    source = shard_config(
        config,
        "rollout",
        TopicInput(INBOX, tuple(config.rollout.hosted(process)), start="latest"),
        topic_input(config, RELAY, newest=newest_manifests(config)),
        index=process,
        heartbeats=True,
        fast_poll=config.emulated,
        unnoted=(PROGRESS, TRAJECTORIES),  # a start is another incarnation and reads its inboxes from their ends
    )
    generate = GenerateTrajectories(
        config.rollout,
        source,
        _backend(config, process),
        process,
        replace(config.relay.endpoint(source.client.bootstrap_servers), port=0),
        interrupts=config.placement.rules.refresh == "interrupt",
        two_versions=config.placement.rules.refresh == "slot",
        frames=_frames(config),
    )
    (
        pipeline
        | "read inboxes" >> ReadTopics(source)
        | "accept and generate" >> FoldRecords(generate, "accept assignments", "generate")
        | "report events" >> ReportEvents(config.kafka.partitions)
        | "repartition hand-overs" >> RepartitionTrajectories()
        | "write trajectories, dead letters" >> WriteTransactionally(source)
    )


def _frames(config: Config) -> dict[str, MessageFrame]:
    """Message frames of environments with a `role`. Raises ValueError if the chat template lacks the role."""
    chatting = [spec for spec in config.rollout.environments if spec.role]
    if not chatting:
        return {}
    from infra.models.checkpoint_folder import load_tokenizer  # deferred: imports torch

    tokenizer = load_tokenizer(config.model_folder())
    return {spec.resolved_name: message_frame(tokenizer, spec.role) for spec in chatting}


def _backend(config: Config, process: int) -> BackendSpec:
    if config.emulated:
        return EmulatedSpec(config.rollout, config.run.time_scale, config.relay.keep_versions)
    spec = VllmSpec if config.rollout.engine == "vllm" else TransformersSpec
    return spec(config.rollout, config.model_folder(), store_folder(config), process)
