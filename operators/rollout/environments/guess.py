"""A text game: guess a number; after each guess the model reads whether it is higher or lower."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any


class Guess:
    """A number from 1 to `most`, which the number of the prompt says. A turn is a line, its last number the guess.

    The right one ends the game and earns 1; one that is nearer than all before earns `nearer`.
    """

    stop = ("\n",)

    def __init__(self, most: int = 100, nearer: float = 0.0) -> None:
        if most < 2:
            raise ValueError(f"most must be at least 2, not {most}")
        self._most, self._nearer = most, nearer

    def reset(self, prompt: Mapping[str, Any]) -> str:
        digest = hashlib.blake2b(str(prompt["number"]).encode(), digest_size=8).digest()
        self._number = 1 + int.from_bytes(digest, "big") % self._most
        self._nearest = self._most + 1
        return f"A number from 1 to {self._most}. Your guess?\n"

    def step(self, text: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        guesses = re.findall(r"\d{1,9}", text, re.ASCII)
        if not guesses:
            return "That is no number.\n", 0.0, False, {}
        guess = int(guesses[-1])
        away = abs(guess - self._number)
        if not away:
            return "Right.\n", 1.0, True, {}
        nearer, self._nearest = away < self._nearest, min(away, self._nearest)
        hint = "higher" if guess < self._number else "lower"
        return f"It is {hint}.\n", self._nearer if nearer else 0.0, False, {}
