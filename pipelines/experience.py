"""experience: the streaming experience buffer. Consumes experiences, produces global batches."""

from __future__ import annotations

import apache_beam as beam

from operators.experience.make_batches import MakeBatches
from operators.experience.pack_batches import PackMicroBatches
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from pipelines.config import Config
from pipelines.sharded_sources import experience_source
from pipelines.shards import shard_numbers


def build(pipeline: beam.Pipeline, config: Config, shard: int | None = None) -> None:
    """Consumes experiences, relay and control; produces batches and settled. A curriculum adds level replies and level
    requests.

    With several shards, or if the run may have several, each consumes its own partitions, the batch proposals of all
    shards, and the batch selections of the first. The pipeline has all shards, or only `shard`.
    """
    shares, divisions = config.trainer.shares, config.experience.divisions
    numbers = shard_numbers("experience", config.experience.shards, shard)
    sources = [experience_source(config, number) for number in numbers]
    make = MakeBatches(
        config.experience,
        config.kafka.partitions,
        shares,
        config.prompts.curricula,
        config.vocabulary,
        config.score.rewards_failures,
        sources[0],
    )
    (
        pipeline
        | "read experiences" >> ReadTopics(*sources)
        | "admit, evict and sample" >> FoldRecords(make, "admit experiences", "evict", "sample batches")
        | "pack micro-batches" >> PackMicroBatches(config.experience.micro_batch_tokens, shares, divisions)
        | "write batches, dead letters" >> WriteTransactionally(*sources)
    )
