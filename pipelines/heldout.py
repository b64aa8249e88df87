"""The held-out prompts that evaluation asks."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from operators.prompts.rendering import PromptTooLong, render
from operators.prompts.sources import all_heldout_questions
from pipelines.config import Config, ConfigError
from schemas.records import Prompt

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
        context, plain = self.config.context, self.config.plain_agents
        rendered: list[Prompt] = []
        skipped = 0
        for number, (task, question) in enumerate(all_heldout_questions(prompts)):
            try:
                rendered.append(
                    render(
                        question, number, task, tokenizer, context, purpose="evaluation", samples=1, plain_agents=plain
                    )
                )
            except PromptTooLong as error:
                skipped += 1
                log.warning("a held-out question is skipped: %s", error)
        if not rendered:
            raise ConfigError(f"all {skipped} held-out questions are too long for a context of {context} tokens")
        return rendered
