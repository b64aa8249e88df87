"""score: consumes trajectories, produces experiences."""

from __future__ import annotations

import apache_beam as beam

from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from operators.score.score_trajectories import ScoreTrajectories
from pipelines.config import Config
from pipelines.sharded_sources import score_source
from pipelines.shards import shard_numbers


def build(pipeline: beam.Pipeline, config: Config, shard: int | None = None) -> None:
    """Consumes trajectories, produces experiences.

    Each shard has its own partitions of both topics. The pipeline has all shards, or only `shard`.
    """
    sources = [score_source(config, number) for number in shard_numbers("score", config.score.shards, shard)]
    score = ScoreTrajectories(config.score, config.kafka.partitions)
    (
        pipeline
        | "read trajectories" >> ReadTopics(*sources)
        | "score" >> FoldRecords(score, "admit trajectories", "extract answers", "verify", "compose rewards")
        | "write experiences, dead letters" >> WriteTransactionally(*sources)
    )
