"""The held-out questions of a run, as prompts."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from infra.models.checkpoint_folder import load_tokenizer
from operators.prompts.rendering import PromptTooLong, render
from operators.prompts.sources import heldout_questions
from pipelines.config import Config, ConfigError
from schemas.records import Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldoutPrompts:
    """Makes the held-out prompts that `config` asks for, sampled as in training; none where it asks for none.

    Those that leave no room for an answer are passed over. Raises ConfigError if that leaves none.
    """

    config: Config

    def __call__(self) -> list[Prompt]:
        prompts = self.config.prompts
        if not prompts.heldout and not prompts.heldout_path:
            return []
        tokenizer = load_tokenizer(self.config.model_folder())
        context = self.config.context
        questions = heldout_questions(prompts)
        made: list[Prompt] = []
        for number, question in enumerate(questions):
            try:
                made.append(render(question, number, prompts, tokenizer, context, purpose="evaluation", samples=1))
            except PromptTooLong as error:
                log.warning("a held-out question is passed over: %s", error)
        if not made:
            raise ConfigError(f"all {len(questions)} held-out questions are too long for a context of {context} tokens")
        return made
