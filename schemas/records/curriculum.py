"""Levels of difficulty: requested by experience, granted by the prompt source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LevelRequest:
    """Requests questions of `level` of `task` ("": the only one) from now on. Written by experience, read by prompts.

    `batch` is the next batch at the time of the request. `success_rate` is the mean success of the `answered` answers
    to questions of the level before.
    """

    task: str
    level: int
    batch: int
    success_rate: float
    answered: int
    requested_at: int


@dataclass(frozen=True, slots=True)
class LevelReply:
    """Training prompts of `task` from number `first_prompt` on are of `level`. Written by prompts, read by experience.

    Written with the first of these prompts. Prompts before the first reply are of level 0.
    """

    task: str
    level: int
    first_prompt: int
    replied_at: int
