"""The held-out questions of a run, as prompts."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from infra.models.checkpoint_folder import load_tokenizer
from operators.prompts.rendering import PromptTooLong, render
from operators.prompts.sources import heldout_of_all
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
        if not any(task.evaluated for task in prompts.mixture):
            return []
        tokenizer = load_tokenizer(self.config.model_folder())
        context = self.config.context
        made: list[Prompt] = []
        passed = 0
        for number, (task, question) in enumerate(heldout_of_all(prompts)):
            try:
                made.append(render(question, number, task, tokenizer, context, purpose="evaluation", samples=1))
            except PromptTooLong as error:
                passed += 1
                log.warning("a held-out question is passed over: %s", error)
        if not made:
            raise ConfigError(f"all {passed} held-out questions are too long for a context of {context} tokens")
        return made
