"""experience: the streaming experience buffer. Consumes experiences, produces global batches."""

from __future__ import annotations

import apache_beam as beam

from operators.experience.make_batches import MakeBatches
from operators.experience.pack_batches import PackMicroBatches
from operators.io.config import ShardConfig, TopicInput
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from pipelines.config import Config
from pipelines.shards import partitions_of, shard_config, shard_numbers, topic_input
from schemas.topics import BATCH_ASSEMBLY, BATCHES, CONTROL, CURRICULUM, EXPERIENCES, LEVEL_REPLY, RELAY, SETTLED


def build(pipeline: beam.Pipeline, config: Config, shard: int | None = None) -> None:
    """Consumes experiences, relay and control; produces batches and settled. A curriculum adds level replies and level
    requests.

    With several shards, each consumes its own partitions, the batch proposals of all shards, and the batch selections
    of the first. The pipeline has all shards, or only `shard`.
    """
    shards, shares = config.experience.shards, config.trainer.shares
    sources = [_source(config, number) for number in shard_numbers("experience", shards, shard)]
    make = MakeBatches(
        config.experience,
        config.kafka.partitions,
        shares,
        config.prompts.curricula,
        config.vocabulary,
        config.score.rewards_failures,
    )
    (
        pipeline
        | "read experiences" >> ReadTopics(*sources)
        | "admit, evict and sample" >> FoldRecords(make, "admit experiences", "evict", "sample batches")
        | "pack micro-batches" >> PackMicroBatches(config.experience.micro_batch_tokens, shares, shards)
        | "write batches, dead letters" >> WriteTransactionally(*sources)
    )


def _source(config: Config, shard: int) -> ShardConfig:
    shards = config.experience.shards
    return shard_config(
        config,
        "experience",
        TopicInput(EXPERIENCES, partitions_of(config, EXPERIENCES)[shard::shards], keys=("p", "i"), blocks=True),
        topic_input(config, RELAY),
        topic_input(config, CONTROL, start="earliest"),
        *([topic_input(config, CURRICULUM, keys=(LEVEL_REPLY,))] if config.prompts.curricula else []),
        *([topic_input(config, BATCH_ASSEMBLY)] if shards > 1 else []),
        ledger=(SETTLED,),
        owned=((BATCHES, tuple(partitions_of(config, BATCHES)[shard::shards])),),
        index=shard,
        slow_poll=True,
    )
