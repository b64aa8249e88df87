"""experience: the streaming experience buffer. Experiences in, global batches out."""

from __future__ import annotations

import apache_beam as beam

from operators.experience.make_batches import MakeBatches
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from pipelines.config import Config
from pipelines.shards import partitions_of, reading, shard
from schemas.topics import BATCHES, BEGUN, CURRICULUM, EXPERIENCES, RELAY, SETTLED


def build(pipeline: beam.Pipeline, config: Config) -> None:
    """Experiences, relay → batches, settled; with a curriculum, levels begun → levels asked for."""
    levels = config.prompts.curricula
    source = shard(
        config,
        "experience",
        reading(config, EXPERIENCES, keys=("p", "i"), blocks=True),
        reading(config, RELAY, start="earliest"),
        *([reading(config, CURRICULUM, start="earliest", keys=(BEGUN,))] if levels else []),
        ledger=(SETTLED,),
    )
    ranks = len(partitions_of(config, BATCHES))
    make = MakeBatches(config.experience, config.kafka.partitions, ranks, levels, config.vocabulary)
    (
        pipeline
        | "read experiences" >> ReadTopics(source)
        | "make batches" >> FoldRecords(make)
        | "write batches" >> WriteTransactionally(source)
    )
