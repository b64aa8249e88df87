"""evaluation: the rollouts that train also answer held-out questions under chosen weight versions."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import apache_beam as beam

from operators.evaluation.evaluate_versions import EvaluateVersions
from operators.evaluation.report_rounds import AskQuestions, ReportRounds
from operators.io.fold_records import FoldRecords
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from operators.prompts.rendering import PromptTooLong, render
from operators.prompts.sources import all_heldout_questions
from pipelines.config import Config, ConfigError
from pipelines.shards import shard_config, topic_input
from schemas.records import Prompt
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
    )
    evaluate = EvaluateVersions(config.evaluation, HeldoutPrompts(config))
    (
        pipeline
        | "read versions and answers" >> ReadTopics(source)
        | "evaluate versions" >> FoldRecords(evaluate, "collect answers", "open rounds")
        | "ask questions" >> AskQuestions()
        | "report rounds" >> ReportRounds()
        | "write rounds, dead letters" >> WriteTransactionally(source)
    )


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldoutPrompts:
    """Renders the held-out prompts of `config`, sampled as in training; none if no task is evaluated.

    Questions too long for the context are skipped. Raises ConfigError if all are.
    """

    config: Config

    def __call__(self) -> list[Prompt]:
        prompts = self.config.prompts
        if not any(task.has_heldout for task in prompts.mixture):
            return []
        from infra.models.checkpoint_folder import load_tokenizer  # deferred: imports torch

        tokenizer = load_tokenizer(self.config.model_folder())
        context = self.config.context
        rendered: list[Prompt] = []
        skipped = 0
        for number, (task, question) in enumerate(all_heldout_questions(prompts)):
            try:
                rendered.append(render(question, number, task, tokenizer, context, purpose="evaluation", samples=1))
            except PromptTooLong as error:
                skipped += 1
                log.warning("a held-out question is skipped: %s", error)
        if not rendered:
            raise ConfigError(f"all {skipped} held-out questions are too long for a context of {context} tokens")
        return rendered
