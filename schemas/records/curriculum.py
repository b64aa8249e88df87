"""How hard questions are to be: asked for by the buffer, answered by the prompt source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LevelRequest:
    """Questions of `level` of `task` ("": the only one) are wanted from now on. Made by experience, eaten by prompts.

    Asked when batch `batch` was the next: of `answered` answers to questions of the level before, a share of `success`
    was right.
    """

    task: str
    level: int
    batch: int
    success: float
    answered: int
    requested_at: int


@dataclass(frozen=True, slots=True)
class LevelReply:
    """Training prompts of `task` from number `number` on are of `level`. Made by prompts, eaten by experience.

    Written with the first of them. Prompts below the first such number are of level 0.
    """

    task: str
    level: int
    number: int
    replied_at: int
