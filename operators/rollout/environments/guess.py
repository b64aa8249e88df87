"""A text game: guess a number; after each guess the observation says whether the number is higher or lower."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any


class Guess:
    """The number, 1 to `maximum`, is derived from the prompt number. A turn is a line; its last number is the guess.

    The correct guess has reward 1 and ends the episode; a guess closer than all before has reward `closer_reward`.
    """

    stop = ("\n",)

    def __init__(self, maximum: int = 100, closer_reward: float = 0.0) -> None:
        if maximum < 2:
            raise ValueError(f"maximum must be at least 2, not {maximum}")
        self._maximum, self._closer_reward = maximum, closer_reward

    def reset(self, prompt: Mapping[str, Any]) -> str:
        digest = hashlib.blake2b(str(prompt["number"]).encode(), digest_size=8).digest()
        self._number = 1 + int.from_bytes(digest, "big") % self._maximum
        self._closest = self._maximum + 1
        return f"A number from 1 to {self._maximum}. Your guess?\n"

    def step(self, text: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        guesses = re.findall(r"\d{1,9}", text, re.ASCII)
        if not guesses:
            return "That is no number.\n", 0.0, False, {}
        guess = int(guesses[-1])
        distance = abs(guess - self._number)
        if not distance:
            return "Right.\n", 1.0, True, {}
        closer, self._closest = distance < self._closest, min(distance, self._closest)
        hint = "higher" if guess < self._number else "lower"
        return f"It is {hint}.\n", self._closer_reward if closer else 0.0, False, {}
