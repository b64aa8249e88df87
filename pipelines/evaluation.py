"""evaluation: the rollouts that train also answer held-out questions under chosen weight versions."""

from __future__ import annotations

import apache_beam as beam

from operators.evaluation.evaluate_versions import EvaluateVersions
from operators.evaluation.report_rounds import PublishQuestions, ReportRounds
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from pipelines.config import Config
from pipelines.heldout import HeldoutPrompts
from pipelines.shards import shard_config, topic_input
from schemas.topics import EVAL_PROMPTS, EXPERIENCES, RELAY


def build(pipeline: beam.Pipeline, config: Config) -> None:
    """Consumes relay and evaluation's experiences; produces eval-prompts, settled and metrics."""
    source = shard_config(
        config,
        "evaluation",
        topic_input(config, EXPERIENCES, keys=("e",)),
        topic_input(config, RELAY),
        owned=((EVAL_PROMPTS, (0,)),),
        slow_poll=True,
        slow_commit=True,
    )
    evaluate = EvaluateVersions(config.evaluation, HeldoutPrompts(config))
    (
        pipeline
        | "read versions and answers" >> ReadTopics(source)
        | "evaluate versions" >> FoldRecords(evaluate, "collect answers", "open rounds")
        | "publish questions" >> PublishQuestions()
        | "report rounds" >> ReportRounds()
        | "write rounds, dead letters" >> WriteTransactionally(source)
    )
