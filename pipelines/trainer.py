"""trainer: consumes batches, publishes weight versions."""

from __future__ import annotations

import apache_beam as beam

from operators.io.config import TopicInput
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from pipelines.config import Config
from pipelines.shards import shard_config, topic_input
from pipelines.training_step import training_step
from schemas.topics import BATCHES, RELAY, RELAY_CHAIN


def build(pipeline: beam.Pipeline, config: Config, rank: int = 0) -> None:
    """Rank 0 consumes batches, relay and relay-chain, and produces relay and metrics; other ranks consume batches."""
    if not 0 <= rank < config.trainer.ranks:
        raise ValueError(f"rank {rank} does not exist: trainer.ranks is {config.trainer.ranks}")
    inputs = [TopicInput(BATCHES, config.trainer.partitions_of(rank, config.experience.divisions))]
    if rank == 0:
        inputs.append(topic_input(config, RELAY))
        inputs += [] if config.emulated_training else [topic_input(config, RELAY_CHAIN, start="earliest")]
    owned = () if rank else ((RELAY, (0,)),)
    source = shard_config(config, "trainer", *inputs, owned=owned, index=rank, fast_poll=config.emulated)
    train, resumed = training_step(config, source, rank)
    (
        pipeline
        | "read batches" >> ReadTopics(resumed)
        | "train" >> FoldRecords(train, "assemble batches", "update", "publish")
        | "write metrics, dead letters" >> WriteTransactionally(source)
    )
