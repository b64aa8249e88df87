"""Configuration of evaluation: which versions, and how many held-out questions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EvaluationConfig:
    """Which versions are evaluated, on how many of the held-out questions (`prompts.heldout`).

    Raises ValueError naming the invalid field.
    """

    every: int = 20
    """Versions between two periodic evaluations, which are greedy; 0: only the first and the final version."""
    periodic_questions: int = 64
    """Questions of a periodic evaluation, from the start of the held-out ones."""
    sampled: bool = True
    """Whether the first and the final version are also evaluated with the sampling of training."""

    def __post_init__(self) -> None:
        for name, least in (("every", 0), ("periodic_questions", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
