"""Configuration of evaluation: which versions, and how many held-out questions."""

from __future__ import annotations

from dataclasses import dataclass

from infra.setting_types import CheckedSettings, NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class EvaluationConfig(CheckedSettings):
    """Which versions are evaluated, on how many of the held-out questions (`prompts.heldout`).

    Raises ValueError naming the invalid field.
    """

    every: NonNegativeInt = 20
    """Versions between two periodic evaluations, which are greedy; 0: only the first and the final version."""
    periodic_questions: PositiveInt = 64
    """Questions of a periodic evaluation, from the start of the held-out ones."""
    sampled: bool = True
    """Whether the first and the final version are also evaluated with the sampling of training."""
