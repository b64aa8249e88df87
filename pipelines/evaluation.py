"""evaluation: held-out questions to chosen weight versions, through the rollouts that train."""

from __future__ import annotations

import apache_beam as beam

from operators.evaluation.evaluate_versions import EvaluateVersions
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from pipelines.config import Config
from pipelines.heldout import HeldoutPrompts
from pipelines.shards import shard_config, topic_input
from schemas.topics import EVAL_PROMPTS, EXPERIENCES, RELAY


def build(pipeline: beam.Pipeline, config: Config) -> None:
    """Relay, evaluation's experiences → eval-prompts, settled, metrics."""
    source = shard_config(
        config,
        "evaluation",
        topic_input(config, EXPERIENCES, keys=("e",)),
        topic_input(config, RELAY),
        owned=((EVAL_PROMPTS, (0,)),),
        patient=True,
    )
    evaluate = EvaluateVersions(config.evaluation, HeldoutPrompts(config))
    (
        pipeline
        | "read versions and answers" >> ReadTopics(source)
        | "evaluate versions" >> FoldRecords(evaluate)
        | "write questions and metrics" >> WriteTransactionally(source)
    )
