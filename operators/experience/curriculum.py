"""The curriculum's memory: which level questions are of, how often they were answered right, and what was asked for.

Success is counted as stories end, in the transaction that ends them, and travels in its note: so each answer counts
once, whatever is killed. Levels that have begun are read from the curriculum topic, from its beginning at each start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from operators.experience.members import Run
from schemas.records import LevelAsked, LevelBegun


class Success(NamedTuple):
    """Of `answered` answers, how many were `right`; where nothing tells, a reward between 0 and 1 stands for it."""

    right: float = 0.0
    answered: int = 0

    @property
    def share(self) -> float:
        """Right of all; 0 where there are none."""
        return self.right / self.answered if self.answered else 0.0


class Curriculum:
    """Of `levels` levels, the one that prompts are made of, and how its questions fare, by task."""

    def __init__(self, levels: int, marks: Sequence[Any] | None = None) -> None:
        self._levels = max(1, levels)
        self.level: int
        self._since: int
        self._asked: bool
        self.level, self._since, self._asked, counts = marks or (0, 0, False, {})
        self.success: dict[str, Success] = {task: Success(*each) for task, each in counts.items()}

    def learn(self, begun: LevelBegun) -> None:
        """Take note of a level, later than those before; what had been counted was of the one before."""
        if begun.number > self._since:
            self.level, self._since, self._asked, self.success = begun.level, begun.number, False, {}

    def count(self, runs: Iterable[Run]) -> None:
        """Stories have ended: those of the present level's questions count."""
        if self._levels < 2:
            return
        for shelf, first, last in runs:
            for row in range(first, last):
                if shelf.numbers[row] >= self._since:
                    accuracy = shelf.accuracies[row]
                    right = min(max(float(shelf.rewards[row]), 0.0), 1.0) if accuracy is None else accuracy
                    before = self.success.get(shelf.tasks[row], Success())
                    self.success[shelf.tasks[row]] = Success(before.right + right, before.answered + 1)

    def ask(self, wish: int, batch: int, now: int) -> LevelAsked | None:
        """What to ask the prompt source for where the sampler wishes for harder (1) or easier (-1) questions.

        Nothing while an answer is awaited, and nothing beyond the first and the last level.
        """
        level = min(max(self.level + wish, 0), self._levels - 1)
        if level == self.level or self._asked:
            return None
        self._asked = True
        everything = total(self.success)
        return LevelAsked(level, batch, everything.share, everything.answered, now)

    def values(self) -> dict[str, float]:
        """What a batch's metric says of it."""
        if self._levels < 2:
            return {}
        return {"curriculum/level": float(self.level), "curriculum/success": total(self.success).share}

    def marks(self) -> Mapping[str, Any]:
        """What a commit's note says of it."""
        if self._levels < 2:
            return {}
        return {"curriculum": [self.level, self._since, self._asked, {t: list(s) for t, s in self.success.items()}]}


def total(success: Mapping[str, Success]) -> Success:
    """That of all tasks together."""
    each = success.values()
    return Success(sum(one.right for one in each), sum(one.answered for one in each))
