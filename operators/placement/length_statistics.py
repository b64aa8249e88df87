"""Estimates of the KV of unfinished trajectories, from the lengths of finished ones."""

from __future__ import annotations

from collections import deque

import numpy as np

WINDOW = 1024


class LengthStatistics:
    """Token counts of the last `WINDOW` finished trajectories of training: the mean prompt, and each response."""

    def __init__(self) -> None:
        self._responses: deque[int] = deque(maxlen=WINDOW)
        self._sum = self._squares = 0
        self._prompt = 0.0
        self._ranked: np.ndarray | None = None

    def add(self, prompt: int, response: int) -> None:
        """Record the tokens of a finished trajectory."""
        if len(self._responses) == WINDOW:
            oldest = self._responses[0]
            self._sum, self._squares = self._sum - oldest, self._squares - oldest * oldest
        self._responses.append(response)
        self._sum, self._squares = self._sum + response, self._squares + response * response
        self._prompt += (prompt - self._prompt) / len(self._responses)
        self._ranked = None

    def kv(self) -> float:
        """Expected KV tokens of a trajectory at a random step of its generation; 0 before any has finished.

        A response of length L runs for L steps with L / 2 tokens on average: E[L²] / 2E[L], plus the prompt.
        """
        return self._prompt + self._squares / (2 * self._sum) if self._sum else self._prompt

    def remaining(self, kv: float) -> float:
        """Expected further tokens of a trajectory that holds `kv` tokens, prompt included.

        The mean over longer responses; half of its present length if none was longer; 0 before any has finished.
        """
        if not self._responses:
            return 0.0
        length, longer = self._longer(kv)
        return float(longer.mean()) - length if len(longer) else length / 2

    def growth(self, kv: float, requests: int) -> float:
        """KV tokens that `requests` trajectories of `kv` tokens each may need together beyond their present ones.

        Some end while others grow, so it is the expected peak of their sum, plus the growth of one as a margin for
        small numbers; at most the sum of all their expected further tokens.
        """
        one = self.remaining(kv)
        length, longer = self._longer(kv)
        if not len(longer):
            return requests * one
        alive = np.arange(len(longer), 0, -1) / len(longer)  # the share that runs just before each end
        peak = float((alive * (longer - length + kv)).max())
        return min(requests * one, requests * max(0.0, peak - kv) + one)

    def _longer(self, kv: float) -> tuple[float, np.ndarray]:
        """The response length of a trajectory that holds `kv`, and the longer observed ones, rising."""
        if self._ranked is None:
            self._ranked = np.sort(np.array(self._responses, np.int64))
        length = max(0.0, kv - self._prompt)
        return length, self._ranked[np.searchsorted(self._ranked, length, side="right") :]
