"""relay: one worker a machine. It gets the run's newest weights from other machines, hands them on, and says so."""

from __future__ import annotations

from dataclasses import replace

import apache_beam as beam

from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from operators.relay.relay import RelayStep
from pipelines.config import Config
from pipelines.shards import newest_manifests, shard_config, store_folder, topic_input
from schemas.topics import RELAY, RELAY_CHAIN, REPLICAS


def build(pipeline: beam.Pipeline, config: Config, index: int = 0) -> None:
    """Relay, relay-chain, replicas (rollout rows) → dead letters; heartbeats (replicas, relay rows) beside it."""
    source = shard_config(
        config,
        "relay",
        topic_input(config, RELAY, newest=newest_manifests(config)),
        topic_input(config, RELAY_CHAIN, start="earliest"),
        topic_input(config, REPLICAS, start="latest", keys=("rollout-",)),
        index=index,
        patient=True,
    )
    relay = replace(config.relay, store=str(store_folder(config)), relay=index)
    (
        pipeline
        | "read manifests" >> ReadTopics(source)
        | "keep weights" >> FoldRecords(RelayStep(relay, source.client, config.run.name))
        | "commit positions" >> WriteTransactionally(source)
    )
