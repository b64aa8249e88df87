"""relay: one worker a machine. It checks what the machine's store holds against the manifests and says so."""

from __future__ import annotations

from dataclasses import replace

import apache_beam as beam

from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from operators.relay.relay import RelayStep
from pipelines.config import Config
from pipelines.shards import reading, shard, store_folder
from schemas.topics import RELAY


def build(pipeline: beam.Pipeline, config: Config, index: int = 0) -> None:
    """Relay → replicas (relay rows)."""
    source = shard(config, "relay", reading(config, RELAY, start="earliest"), index=index, patient=True)
    (
        pipeline
        | "read manifests" >> ReadTopics(source)
        | "keep weights" >> FoldRecords(RelayStep(replace(config.relay, store=str(store_folder(config)), relay=index)))
        | "write relay status" >> WriteTransactionally(source)
    )
