"""When held-out questions are asked, and how many."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EvaluationConfig:
    """Raises ValueError naming the field that does not fit. The questions come from the prompts' `heldout`."""

    every: int = 20
    """Versions between two periodic evaluations, which are greedy; 0: only the first and the last version."""
    periodic_questions: int = 64
    """Questions of a periodic evaluation: the first so many of the held-out ones."""
    sampled: bool = True
    """Whether the first and the last version are also evaluated with the training's sampling."""

    def __post_init__(self) -> None:
        for name, least in (("every", 0), ("periodic_questions", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
