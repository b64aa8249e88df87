"""experience: the streaming experience buffer. Experiences in, global batches out."""

from __future__ import annotations

import apache_beam as beam

from operators.experience.make_batches import MakeBatches
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from pipelines.config import Config
from pipelines.shards import reading, shard
from schemas.topics import EXPERIENCES, RELAY, SETTLED


def build(pipeline: beam.Pipeline, config: Config) -> None:
    """Experiences, relay → batches, settled."""
    source = shard(
        config,
        "experience",
        reading(config, EXPERIENCES, keys="p"),
        reading(config, RELAY, start="earliest"),
        ledger=(SETTLED,),
    )
    (
        pipeline
        | "read experiences" >> ReadTopics(source)
        | "make batches" >> FoldRecords(MakeBatches(config.experience, config.kafka.partitions))
        | "write batches" >> WriteTransactionally(source)
    )
