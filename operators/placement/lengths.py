"""What the lengths of finished trajectories say of those under way."""

from __future__ import annotations

from collections import deque

import numpy as np

REMEMBERED = 1024


class LengthsSeen:
    """Tokens of the last finished trajectories: prompts on average, responses one by one."""

    def __init__(self) -> None:
        self._responses: deque[int] = deque(maxlen=REMEMBERED)
        self._sum = self._squares = 0
        self._prompt = 0.0
        self._ranked: np.ndarray | None = None

    def add(self, prompt: int, response: int) -> None:
        """A trajectory has finished."""
        if len(self._responses) == REMEMBERED:
            oldest = self._responses[0]
            self._sum, self._squares = self._sum - oldest, self._squares - oldest * oldest
        self._responses.append(response)
        self._sum, self._squares = self._sum + response, self._squares + response * response
        self._prompt += (prompt - self._prompt) / len(self._responses)
        self._ranked = None

    def kv(self) -> float:
        """KV tokens of a trajectory at a random moment of its generation; 0 before any has finished.

        One of length L is there for L steps with L / 2 on average, so it is E[L²] / 2E[L] beyond the prompt.
        """
        return self._prompt + self._squares / (2 * self._sum) if self._sum else self._prompt

    def remaining(self, kv: float) -> float:
        """Tokens still to come for a trajectory that holds `kv`, its prompt included: the mean over longer responses,
        half as many as it has if none was.

        0 before any has finished.
        """
        if not self._responses:
            return 0.0
        length, longer = self._longer(kv)
        return float(longer.mean()) - length if len(longer) else length / 2

    def growth(self, kv: float, requests: int) -> float:
        """KV tokens that so many trajectories of `kv` each may come to hold together beyond what they do now.

        While those that go on grow others end, so it is the expected peak of their sum, and what one may gain by
        itself for the luck of few; never more than if all went on to their ends.
        """
        one = self.remaining(kv)
        length, longer = self._longer(kv)
        if not len(longer):
            return requests * one
        alive = np.arange(len(longer), 0, -1) / len(longer)  # just before each of the ends
        peak = float((alive * (longer - length + kv)).max())
        return min(requests * one, requests * max(0.0, peak - kv) + one)

    def _longer(self, kv: float) -> tuple[float, np.ndarray]:
        """The response of a trajectory that holds `kv`, and the responses seen that were longer, rising."""
        if self._ranked is None:
            self._ranked = np.sort(np.array(self._responses, np.int64))
        length = max(0.0, kv - self._prompt)
        return length, self._ranked[np.searchsorted(self._ranked, length, side="right") :]
