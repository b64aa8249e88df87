"""The metric `score`: scored trajectories, errors, the first error of each task, and episodes of environments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from infra.runners.step_metrics import StepCounters
from infra.workers.error_text import first_line
from schemas.block import Block
from schemas.metric_labels import ENDING, FIRST_ERROR, SHARD, TASK, TEXT, by_label, labelled, split_labels
from schemas.records import AGENT, Metric

EVERY_MS = 1_000
"""The shortest time between two metrics."""
ALONE_MS = 5_000
"""The same without experiences: such a metric costs a transaction of its own."""
COUNTS = (
    "trajectories",
    "reward_errors",
    "episode_errors",
    "generation_errors",
    "heldout_trajectories",
    "heldout_errors",
)
"""Scored trajectories of training; those whose reward function failed, whose environment failed, whose generation
failed. Then those of evaluation, and those of them with any error: nothing is trained on them."""
MAX_TASKS = 128
"""Tasks with counts of their own, the first ones; all others count as `OTHER`. Each commit note holds the counts, and
rows of a file may name any number of tasks, of any length."""
OTHER = "other"
MAX_FIRST_ERRORS = 8
"""Tasks whose first error is kept, with at most `MAX_CHARACTERS`: each commit note holds it."""
MAX_CHARACTERS = 160
"""Of a first error, and of the name of a task that has counts of its own."""
EPISODES, TURNS, ENDINGS = "episodes", "episode_turns", "episode_endings"


class ScoreCounters:
    """The counts of `shard` since the start of the run, also by task and of episodes.

    `state` of the commit note continues them after a restart.
    """

    def __init__(self, group: str, state: Mapping[str, int] | None = None, shard: int = 0, shards: int = 1) -> None:
        known = state or {}
        self._shard = {SHARD: float(shard)} if shards > 1 else {}
        self._counters = StepCounters(group, {name: known.get(name, 0) for name in COUNTS})
        self._by_task = TaskErrorCounts({name: count for name, count in known.items() if name not in COUNTS})
        self._published = self._scored()
        self._published_at = 0

    def add(self, experiences: Block) -> None:
        held_out = pc.equal(experiences.column("trajectory.prompt.purpose"), "evaluation")
        failed = pc.equal(experiences.column("trajectory.finish_reason"), "failed")
        in_episode = pc.not_equal(experiences.column("trajectory.prompt.environment"), "")
        errors = pc.is_valid(experiences.column("error"))
        for name, kind in (
            ("reward_errors", pc.and_not(errors, failed)),
            ("episode_errors", pc.and_(failed, in_episode)),
            ("generation_errors", pc.and_not(failed, in_episode)),
        ):
            self._counters.add(name, _true(pc.and_not(kind, held_out)))
        self._counters.add("trajectories", len(experiences) - _true(held_out))
        self._counters.add("heldout_trajectories", _true(held_out))
        self._counters.add("heldout_errors", _true(pc.and_(pc.or_(errors, failed), held_out)))
        trained = pc.invert(held_out)
        self._by_task.add(experiences, trained)
        count_episodes(self._by_task.values, experiences, trained)

    def metric(self, now: int, *, alone: bool = False, last: bool = False) -> Metric | None:
        """The metric `score` at `now` (Unix milliseconds) if the counts are new and the last one is old enough.

        `alone`: without experiences; `last`: whatever its age.
        """
        scored, every_ms = self._scored(), 0 if last else ALONE_MS if alone else EVERY_MS
        if scored == self._published or 0 <= now - self._published_at < every_ms:  # negative: the clock was set back
            return None
        self._published, self._published_at = scored, now
        counts = {name: float(count) for name, count in self.state().items()}
        return Metric("score", scored, counts | self._shard, now)

    def state(self) -> dict[str, int]:
        """The counts, JSON-ready."""
        return {**self._counters.totals, **self._by_task.values}

    def _scored(self) -> int:
        return self._counters.totals["trajectories"] + self._counters.totals["heldout_trajectories"]


def _true(values: pa.Array) -> int:
    return int(pc.sum(values).as_py() or 0)


class TaskErrorCounts:
    """Values of the metric `score` with the label `task`; they continue from `earlier`, as do those without a task.

    `first_error` is 1, with the first line of the task's first error in the label `text`.
    """

    def __init__(self, earlier: Mapping[str, int]) -> None:
        self.values: Counter[str] = Counter()
        self._tasks: set[str] = set()
        for key, count in earlier.items():  # a release without MAX_TASKS may have written more tasks
            name, labels = split_labels(key)
            if TASK in labels:
                key = labelled(name, **{**labels, TASK: self._label(labels[TASK])})
            self.values[key] += count

    def _label(self, task: str) -> str:
        """The task under which `task` is counted."""
        if task not in self._tasks:
            if len(self._tasks) >= MAX_TASKS or len(task) > MAX_CHARACTERS or task == OTHER:
                return OTHER
            self._tasks.add(task)
        return task

    def add(self, experiences: Block, trained: pa.Array) -> None:
        """Count the `experiences` for which `trained` is true."""
        tasks = experiences.column("trajectory.prompt.task").filter(trained)
        errors = experiences.column("error").filter(trained)
        wrong = pc.is_valid(errors)
        failed, messages = tasks.filter(wrong), errors.filter(wrong)
        for name, found in (("trajectories", tasks), ("errors", failed)):
            for each in pc.value_counts(found).to_pylist():
                self.values[labelled(name, task=self._label(each["values"]))] += each["counts"]
        first: dict[str, str] = {}
        for task, message in zip(failed.to_pylist(), messages.to_pylist(), strict=True):
            first.setdefault(self._label(task), message)
        self._keep(first)

    def _keep(self, first: Mapping[str, str]) -> None:
        """Keep the errors of tasks that had none before."""
        known = {task for task, values in by_label(self.values, TASK).items() if FIRST_ERROR in values} if first else ()
        new = [task for task in first if task not in known][: MAX_FIRST_ERRORS - len(known)]
        for task in new:
            self.values[labelled(FIRST_ERROR, **{TASK: task, TEXT: first_line(first[task])[:MAX_CHARACTERS]})] = 1


def count_episodes(values: Counter[str], experiences: Block, trained: pa.Array) -> None:
    """Add to `values` the episodes of `experiences` for which `trained` is true. Those of agents have own metrics."""
    endings = experiences.column("trajectory.episode.ending")
    own = pc.and_(pc.is_valid(endings), pc.not_equal(experiences.column("trajectory.prompt.environment"), AGENT))
    counted = pc.and_(own, trained)
    turns = pc.list_value_length(experiences.column("trajectory.episode.rewards").filter(counted))
    if not len(turns):
        return
    values[EPISODES] += len(turns)
    values[TURNS] += pc.sum(turns).as_py() or 0
    for each in pc.value_counts(endings.filter(counted)).to_pylist():
        values[labelled(ENDINGS, **{ENDING: each["values"]})] += each["counts"]
