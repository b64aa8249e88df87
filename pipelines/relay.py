"""relay: one worker per machine. It fetches the newest weights from other machines, serves them and reports them."""

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
    """Consumes relay, relay-chain and replicas (rollout rows); produces dead letters. A plain producer sends heartbeats
    (replicas, relay rows).
    """
    source = shard_config(
        config,
        "relay",
        topic_input(config, RELAY, newest=newest_manifests(config)),
        topic_input(config, RELAY_CHAIN, start="earliest"),
        topic_input(config, REPLICAS, start="latest", keys=("rollout-",)),
        index=index,
        slow_poll=True,
        slow_commit=True,
    )
    relay = replace(config.relay, store=str(store_folder(config)), relay=index)
    serve = RelayStep(relay, source.client, config.run.name)
    (
        pipeline
        | "read manifests" >> ReadTopics(source)
        | "serve weights" >> FoldRecords(serve, "track manifests", "evict versions", "verify versions")
        | "write dead letters" >> WriteTransactionally(source)
    )
