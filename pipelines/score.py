"""score: consumes trajectories, produces experiences."""

from __future__ import annotations

import apache_beam as beam

from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from operators.score.score_trajectories import ScoreTrajectories
from pipelines.config import Config
from pipelines.shards import shard_config, topic_input
from schemas.topics import EXPERIENCES, TRAJECTORIES


def build(pipeline: beam.Pipeline, config: Config) -> None:
    """Consumes trajectories, produces experiences."""
    source = shard_config(config, "score", topic_input(config, TRAJECTORIES, blocks=True), ledger=(EXPERIENCES,))
    score = ScoreTrajectories(config.score, config.kafka.partitions)
    (
        pipeline
        | "read trajectories" >> ReadTopics(source)
        | "score" >> FoldRecords(score, "admit trajectories", "extract answers", "verify", "compose rewards")
        | "write experiences, dead letters" >> WriteTransactionally(source)
    )
