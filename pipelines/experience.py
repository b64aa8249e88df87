"""experience: the streaming experience buffer. Consumes experiences, produces global batches."""

from __future__ import annotations

import apache_beam as beam

from operators.experience.make_batches import MakeBatches
from operators.experience.pack_batches import PackMicroBatches
from operators.io.config import TopicInput
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from pipelines.config import Config
from pipelines.shards import partitions_of, shard_config, topic_input
from schemas.topics import BATCH_ASSEMBLY, BATCHES, CONTROL, CURRICULUM, EXPERIENCES, LEVEL_REPLY, RELAY, SETTLED


def build(pipeline: beam.Pipeline, config: Config, shard: int = 0) -> None:
    """Consumes experiences, relay and control; produces batches and settled. A curriculum adds level replies and level
    requests.

    With several shards, each consumes its own partitions, the batch proposals of all shards, and the batch selections
    of the first.
    """
    shards, levels = config.experience.shards, config.prompts.curricula
    if not 0 <= shard < shards:
        raise ValueError(f"shard {shard} does not exist: experience.shards is {shards}")
    source = shard_config(
        config,
        "experience",
        TopicInput(EXPERIENCES, partitions_of(config, EXPERIENCES)[shard::shards], keys=("p", "i"), blocks=True),
        topic_input(config, RELAY),
        topic_input(config, CONTROL, start="earliest"),
        *([topic_input(config, CURRICULUM, keys=(LEVEL_REPLY,))] if levels else []),
        *([topic_input(config, BATCH_ASSEMBLY)] if shards > 1 else []),
        ledger=(SETTLED,),
        owned=((BATCHES, tuple(partitions_of(config, BATCHES)[shard::shards])),),
        index=shard,
    )
    partitions, ranks = config.kafka.partitions, config.trainer.ranks
    make = MakeBatches(config.experience, partitions, ranks, levels, config.vocabulary, shard)
    (
        pipeline
        | "read experiences" >> ReadTopics(source)
        | "admit, evict and sample" >> FoldRecords(make, "admit experiences", "evict", "sample batches")
        | "pack micro-batches" >> PackMicroBatches(config.experience.micro_batch_tokens, ranks, shard, shards)
        | "write batches, dead letters" >> WriteTransactionally(source)
    )
