"""score: consumes trajectories, produces experiences."""

from __future__ import annotations

import apache_beam as beam

from operators.io.config import ShardConfig, TopicInput
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from operators.score.score_trajectories import ScoreTrajectories
from pipelines.config import Config
from pipelines.shards import partitions_of, shard_config, shard_numbers
from schemas.topics import EXPERIENCES, TRAJECTORIES


def build(pipeline: beam.Pipeline, config: Config, shard: int | None = None) -> None:
    """Consumes trajectories, produces experiences.

    Each shard has its own partitions of both topics. The pipeline has all shards, or only `shard`.
    """
    sources = [source_of(config, number) for number in shard_numbers("score", config.score.shards, shard)]
    score = ScoreTrajectories(config.score, config.kafka.partitions)
    (
        pipeline
        | "read trajectories" >> ReadTopics(*sources)
        | "score" >> FoldRecords(score, "admit trajectories", "extract answers", "verify", "compose rewards")
        | "write experiences, dead letters" >> WriteTransactionally(*sources)
    )


def source_of(config: Config, shard: int) -> ShardConfig:
    """The source of a shard."""
    shards = config.score.shards
    own = partitions_of(config, TRAJECTORIES)[shard::shards]
    return shard_config(
        config,
        "score",
        TopicInput(TRAJECTORIES, own, blocks=True),
        ledger=(EXPERIENCES,),
        ledger_partitions=own,
        index=shard,
        shards=shards,
    )
