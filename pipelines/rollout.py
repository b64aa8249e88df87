"""rollout: assignments in, trajectories out, by the replicas that this process hosts."""

from __future__ import annotations

from dataclasses import replace

import apache_beam as beam

from operators.io.config import Reading
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from operators.rollout.backend import BackendSpec, EmulatedSpec, TransformersSpec, VllmSpec
from operators.rollout.generate_trajectories import GenerateTrajectories
from pipelines.config import Config
from pipelines.shards import reading, shard, store_folder
from schemas.topics import INBOX, RELAY


def build(pipeline: beam.Pipeline, config: Config, process: int = 0) -> None:
    """Inbox, relay → trajectories, progress, inbox (hand-over); heartbeats beside it."""
    source = shard(
        config,
        "rollout",
        Reading(INBOX, tuple(config.rollout.hosted(process)), start="latest"),
        reading(config, RELAY, start="earliest"),
        index=process,
        attentive=config.emulated,
    )
    generate = GenerateTrajectories(
        config.rollout,
        source,
        _backend(config),
        process,
        config.kafka.partitions,
        replace(config.relay.door(), port=0),
        interrupts=config.placement.rules.refresh == "interrupt",
    )
    (
        pipeline
        | "read inboxes" >> ReadTopics(source)
        | "generate trajectories" >> FoldRecords(generate)
        | "write trajectories" >> WriteTransactionally(source)
    )


def _backend(config: Config) -> BackendSpec:
    if config.emulated:
        return EmulatedSpec(config.rollout, config.run.time_scale, config.relay.keep_versions)
    spec = VllmSpec if config.rollout.engine == "vllm" else TransformersSpec
    return spec(config.rollout, config.model_folder(), store_folder(config))
