"""The sources of the roles that may have several shards."""

from __future__ import annotations

from operators.experience.buffer_layout import BufferLayout
from operators.io.config import ShardConfig, TopicInput
from pipelines.config import Config
from pipelines.shards import partitions_of, shard_config, topic_input
from schemas.identity import LETTERS
from schemas.topics import (
    BATCH_ASSEMBLY,
    BATCHES,
    CONTROL,
    CURRICULUM,
    EXPERIENCES,
    LEVEL_REPLY,
    RELAY,
    SETTLED,
    TRAJECTORIES,
)


def score_source(config: Config, shard: int) -> ShardConfig:
    """The source of shard `shard` of score: its own partitions of both topics."""
    shards = config.score.shards
    own = partitions_of(config, TRAJECTORIES)[shard::shards]
    return shard_config(
        config,
        "score",
        TopicInput(TRAJECTORIES, own, blocks=True),
        ledger=(EXPERIENCES,),
        ledger_partitions=own,
        ledger_keys=rf"[{LETTERS['train']}{LETTERS['evaluation']}]\d+",  # other rows are imported
        index=shard,
        shards=shards,
        slow_poll=True,
    )


def experience_source(config: Config, shard: int) -> ShardConfig:
    """The source of shard `shard` of the buffer: its partitions of experiences, and how the shards assemble batches."""
    buffer, batches = config.experience, partitions_of(config, BATCHES)
    layout = BufferLayout(config.kafka.partitions, buffer.divisions, buffer.shards, shard)
    return shard_config(
        config,
        "experience",
        TopicInput(EXPERIENCES, layout.own_partitions, keys=("p", "i"), blocks=True),
        topic_input(config, RELAY),
        topic_input(config, CONTROL, start="earliest"),
        *([topic_input(config, CURRICULUM, keys=(LEVEL_REPLY,))] if config.prompts.curricula else []),
        *([topic_input(config, BATCH_ASSEMBLY)] if buffer.divisions > 1 else []),
        ledger=(SETTLED,),
        owned=((BATCHES, tuple(p for p in batches if p % buffer.divisions in layout.own_divisions)),),
        index=shard,
        shards=buffer.shards if buffer.max_shards else 1,  # notes of a fixed number do not record it
        slow_poll=True,
    )
