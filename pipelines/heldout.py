"""The held-out questions of a run, as prompts."""

from __future__ import annotations

from dataclasses import dataclass

from infra.models.checkpoint_folder import load_tokenizer
from infra.models.context import context_length
from operators.prompts.rendering import render
from operators.prompts.sources import heldout_questions
from pipelines.config import Config
from schemas.records import Prompt


@dataclass(frozen=True)
class HeldoutPrompts:
    """Makes the held-out prompts that `config` asks for, sampled as in training; none where it asks for none."""

    config: Config

    def __call__(self) -> list[Prompt]:
        model = self.config.model_folder()
        prompts = self.config.prompts
        if not prompts.heldout and not prompts.heldout_path:
            return []
        tokenizer = load_tokenizer(model)
        context = self.config.rollout.context or context_length(model)
        questions = heldout_questions(prompts)
        return [
            render(question, number, prompts, tokenizer, context, purpose="evaluation", samples=1)
            for number, question in enumerate(questions)
        ]
