"""The state of the curricula: the present level of each task, the success at it, and whether a request is open.

An answer is counted in the transaction that settles it, and the commit note of that transaction holds the counts and
the present level. Each answer is therefore counted once, whichever process is killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from operators.experience.members import RowRun
from schemas.metric_labels import labelled
from schemas.records import LevelReply, LevelRequest, LevelSuccess


class Success(NamedTuple):
    """`right` of `answered` answers are correct. A reward, clipped to [0, 1], counts where there is no accuracy."""

    right: float = 0.0
    answered: int = 0

    @property
    def rate(self) -> float:
        """The success rate; 0 without answers."""
        return self.right / self.answered if self.answered else 0.0

    def plus(self, right: float, answered: int) -> Success:
        """This success with `right` of `answered` further answers."""
        return Success(self.right + right, self.answered + answered)


class Curriculum:
    """The curriculum of `task` ("": of the only task, whatever its name), which has `levels` levels.

    Of the answers at a level the last `window` to twice as many count (None: all of them): a model that learns is
    judged by what it can do now.
    """

    def __init__(self, task: str, levels: int, state: Sequence[Any] | None = None, window: int | None = None) -> None:
        self.task, self.levels, self._window = task, levels, window
        self.level: int
        self._since: int
        self._requested: int | None
        """The level of the open request, None if none is open. True: release 0.2.0 did not record the level."""
        self.level, self._since, requested, counts = state or (0, 0, None, {})
        self._requested = None if requested is False else requested
        self.success: dict[str, Success] = {task: Success(*each) for task, each in counts.items()}
        """By task: the answers that this shard of the buffer has settled."""
        self._other_shards: dict[int, LevelSuccess] = {}
        self._reported: dict[str, Success] | None = None

    def all_shards(self) -> dict[str, Success]:
        """By task: the success over all shards of the buffer, as far as the others have reported it."""
        found = dict(self.success)
        for report in self._other_shards.values():
            if report.first_prompt == self._since:
                for task, right, answered in zip(report.tasks, report.correct, report.answered, strict=True):
                    found[task] = found.get(task, Success()).plus(right, answered)
        return found

    def handle_success(self, report: LevelSuccess) -> None:
        """Record the success of another shard. Each report replaces the one before."""
        self._other_shards[report.shard] = report

    def report(self, shard: int, now: int) -> LevelSuccess | None:
        """This shard's success, for the others; None if it has not changed since the last report."""
        if self.success == self._reported:
            return None
        self._reported = dict(self.success)
        each = self.success.values()
        right, answered = tuple(one.right for one in each), tuple(one.answered for one in each)
        return LevelSuccess(shard, self.task, self._since, tuple(self.success), right, answered, now)

    def handle_reply(self, reply: LevelReply) -> None:
        """Change to the level of `reply` and reset the counts, unless it is the present one or began before that.

        Two levels begin at one prompt if none was drawn in between.
        """
        present = self.level, self._since
        if reply.first_prompt >= self._since and (reply.level, reply.first_prompt) != present:
            self.level, self._since, self._requested, self.success = reply.level, reply.first_prompt, None, {}

    def count(self, number: int, task: str, right: float) -> None:
        """Count a settled answer to prompt `number` if the prompt is of the present level."""
        if number >= self._since:
            self.success[task] = self.success.get(task, Success()).plus(right, 1)
            self.success = without_oldest(self.success, self._window)

    def request(self, change: int, batch: int, now: int) -> LevelRequest | None:
        """The request for a level that is harder (`change` 1) or easier (-1) than the present one.

        None while a request is open, and None beyond the first and the last level.
        """
        level = min(max(self.level + change, 0), self.levels - 1)
        if level == self.level or self._requested is not None:
            return None
        self._requested = level
        overall = total_success(self.all_shards())
        return LevelRequest(self.task, level, batch, overall.rate, overall.answered, now)

    def state(self) -> Sequence[Any]:
        """The state that the commit note holds."""
        return [self.level, self._since, self._requested, {task: list(each) for task, each in self.success.items()}]


class Curricula:
    """The curricula of all tasks whose entry in `levels` is above 1; task "" is the only task, whatever its name."""

    def __init__(
        self, levels: Mapping[str, int], state: Mapping[str, Any] | None = None, window: int | None = None
    ) -> None:
        saved = state or {}
        self._by_task = {
            task: Curriculum(task, count, saved.get(task), window) for task, count in levels.items() if count > 1
        }

    def __iter__(self) -> Iterator[Curriculum]:
        return iter(self._by_task.values())

    def handle_reply(self, reply: LevelReply | LevelRequest, prompts: Mapping[str, Any]) -> str | None:
        """Pass a reply to the curriculum of its task. `prompts` is the state in the last commit note of prompts.

        Returns why it is rejected, or None.
        """
        if isinstance(reply, LevelRequest):
            return "a request with the key of a reply is of another program"
        curriculum, name = self._by_task.get(reply.task), reply.task[:80]
        if curriculum is None:
            return f"task {name!r} has no curriculum"
        if reply.level >= curriculum.levels:
            return f"level {reply.level} of task {name!r}, which has {curriculum.levels} levels"
        if not has_begun(reply, prompts):
            where = f"level {reply.level} of task {name!r} at prompt {reply.first_prompt}"
            return f"prompts has not begun {where}: the reply is of another program"
        curriculum.handle_reply(reply)
        return None

    def handle_success(self, report: LevelSuccess, shard: int) -> None:
        """Record another shard's success; `shard`'s own report is ignored."""
        if report.shard != shard and report.curriculum in self._by_task:
            self._by_task[report.curriculum].handle_success(report)

    def reports(self, shard: int, now: int) -> Iterator[LevelSuccess]:
        """This shard's success, for the others: one report for each curriculum whose counts have changed."""
        for each in self:
            report = each.report(shard, now)
            if report is not None:
                yield report

    def count(self, runs: Iterable[RowRun]) -> None:
        """Count the settled answers in `runs`."""
        if not self._by_task:
            return
        for block, first, last in runs:
            for row in range(first, last):
                task = block.tasks[row]
                curriculum = self._by_task.get("", self._by_task.get(task))
                if curriculum is not None:
                    accuracy = block.accuracies[row]
                    right = min(max(float(block.rewards[row]), 0.0), 1.0) if accuracy is None else accuracy
                    curriculum.count(block.numbers[row], task, right)

    def values(self) -> dict[str, float]:
        """The values that a batch's metric has of the curricula; with the task as a label if there are several."""
        values: dict[str, float] = {}
        for each in self:
            labels = {"task": each.task} if len(self._by_task) > 1 else {}
            values |= {
                labelled("curriculum/level", **labels): float(each.level),
                labelled("curriculum/success", **labels): total_success(each.all_shards()).rate,
            }
        return values

    def state(self) -> Mapping[str, Any]:
        """The state that the commit note holds."""
        return {"curriculum": {each.task: each.state() for each in self}} if self._by_task else {}


def has_begun(reply: LevelReply, prompts: Mapping[str, Any]) -> bool:
    """Whether prompts, the state of whose commit note is `prompts`, has begun the level of `reply` where it says.

    Prompts of release 0.2.0 did not record where its levels began, only that the prompt has been drawn.
    """
    levels: Mapping[str, Any] | None = prompts.get("levels")
    begun = [(reply.level, None)] if levels is None else levels.get(reply.task, ())
    drawn = reply.first_prompt <= prompts.get("number", -1)
    return drawn and any(level == reply.level and first in (None, reply.first_prompt) for level, first in begun)


def total_success(success: Mapping[str, Success]) -> Success:
    """The sum over all tasks."""
    each = success.values()
    return Success(sum(one.right for one in each), sum(one.answered for one in each))


def without_oldest(success: dict[str, Success], window: int | None) -> dict[str, Success]:
    """`success` with half the weight once there are more than twice `window` answers, at the same rate of each task."""
    if window is None or total_success(success).answered <= 2 * window:
        return success
    halves = {task: each.answered // 2 for task, each in success.items()}
    return {task: Success(each.rate * halves[task], halves[task]) for task, each in success.items() if halves[task]}
