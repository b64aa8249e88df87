"""The curricula's memory: the level of each task's questions, how often they were answered right, what was asked for.

Success is counted as stories end, in the transaction that ends them, and travels in its note: so each answer counts
once, whatever is killed. So does the level that has begun last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from operators.experience.members import RowRun
from schemas.records import LevelReply, LevelRequest, LevelSuccess


class Success(NamedTuple):
    """Of `answered` answers, how many were `right`; where nothing tells, a reward between 0 and 1 stands for it."""

    right: float = 0.0
    answered: int = 0

    @property
    def share(self) -> float:
        """Right of all; 0 where there are none."""
        return self.right / self.answered if self.answered else 0.0


class Curriculum:
    """Of `levels` levels of `task` ("": of all), the one that prompts are made of, and how its questions fare."""

    def __init__(self, task: str, levels: int, state: Sequence[Any] | None = None) -> None:
        self.task, self._levels = task, levels
        self.level: int
        self._since: int
        self._asked: bool
        self.level, self._since, self._asked, counts = state or (0, 0, False, {})
        self.success: dict[str, Success] = {task: Success(*each) for task, each in counts.items()}
        """Of the answers that this shard of the buffer has seen."""
        self._others: dict[int, LevelSuccess] = {}
        self._told: dict[str, Success] | None = None

    def known(self) -> dict[str, Success]:
        """That of all shards of the buffer, as far as the others have told it."""
        found = dict(self.success)
        for told in self._others.values():
            if told.since == self._since:
                for task, right, answered in zip(told.tasks, told.right, told.answered, strict=True):
                    before = found.get(task, Success())
                    found[task] = Success(before.right + right, before.answered + answered)
        return found

    def hear(self, told: LevelSuccess) -> None:
        """Another shard tells of its success, all of it each time."""
        self._others[told.shard] = told

    def tell(self, shard: int, now: int) -> LevelSuccess | None:
        """What there is to tell the others; None where nothing is new."""
        if self.success == self._told:
            return None
        self._told = dict(self.success)
        each = self.success.values()
        right, answered = tuple(one.right for one in each), tuple(one.answered for one in each)
        return LevelSuccess(shard, self.task, self._since, tuple(self.success), right, answered, now)

    def learn(self, begun: LevelReply) -> None:
        """Take note of a level, later than those before; what had been counted was of the one before."""
        if begun.number > self._since:
            self.level, self._since, self._asked, self.success = begun.level, begun.number, False, {}

    def count(self, number: int, task: str, right: float) -> None:
        """The story of an answer to prompt `number` has ended: those to the present level's questions count."""
        if number >= self._since:
            before = self.success.get(task, Success())
            self.success[task] = Success(before.right + right, before.answered + 1)

    def ask(self, wish: int, batch: int, now: int) -> LevelRequest | None:
        """What to ask the prompt source for where the sampler wishes for harder (1) or easier (-1) questions.

        Nothing while an answer is awaited, and nothing beyond the first and the last level.
        """
        level = min(max(self.level + wish, 0), self._levels - 1)
        if level == self.level or self._asked:
            return None
        self._asked = True
        everything = total(self.known())
        return LevelRequest(self.task, level, batch, everything.share, everything.answered, now)

    def state(self) -> Sequence[Any]:
        """What a commit's note says of it."""
        return [self.level, self._since, self._asked, {task: list(each) for task, each in self.success.items()}]


class Curricula:
    """The curricula of the tasks that have one: of `levels` those with several; "" is the only task, of any name."""

    def __init__(self, levels: Mapping[str, int], state: Mapping[str, Any] | None = None) -> None:
        known = state or {}
        self._of = {task: Curriculum(task, count, known.get(task)) for task, count in levels.items() if count > 1}

    def __iter__(self) -> Iterator[Curriculum]:
        return iter(self._of.values())

    def learn(self, begun: LevelReply) -> None:
        """Take note of a level; one of a task that has none here is nothing."""
        if begun.task in self._of:
            self._of[begun.task].learn(begun)

    def hear(self, told: LevelSuccess, shard: int) -> None:
        """A shard tells of its success; this one's own word is passed over."""
        if told.shard != shard and told.curriculum in self._of:
            self._of[told.curriculum].hear(told)

    def tell(self, shard: int, now: int) -> Iterator[LevelSuccess]:
        """What this shard tells the others."""
        for each in self:
            told = each.tell(shard, now)
            if told is not None:
                yield told

    def count(self, runs: Iterable[RowRun]) -> None:
        """Stories have ended."""
        if not self._of:
            return
        for shelf, first, last in runs:
            for row in range(first, last):
                task = shelf.tasks[row]
                curriculum = self._of.get("", self._of.get(task))
                if curriculum is not None:
                    accuracy = shelf.accuracies[row]
                    right = min(max(float(shelf.rewards[row]), 0.0), 1.0) if accuracy is None else accuracy
                    curriculum.count(shelf.numbers[row], task, right)

    def values(self) -> dict[str, float]:
        """What a batch's metric says of them: by task where there are several."""
        told: dict[str, float] = {}
        for each in self:
            task = f"/{each.task}" if len(self._of) > 1 else ""
            told |= {
                f"curriculum/level{task}": float(each.level),
                f"curriculum/success{task}": total(each.known()).share,
            }
        return told

    def state(self) -> Mapping[str, Any]:
        """What a commit's note says of them."""
        return {"curriculum": {each.task: each.state() for each in self}} if self._of else {}


def total(success: Mapping[str, Success]) -> Success:
    """That of all tasks together."""
    each = success.values()
    return Success(sum(one.right for one in each), sum(one.answered for one in each))
