"""The step's memory: one a start, made by Restored, fed by that start's polls alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence

import pytest

from infra.runners.liveness import LIVENESS, StepBudget
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored
from operators.io.fold_records import _FoldFn, close_folds, is_busy
from schemas.records import DeadLetter, Metric
from schemas.topics import DEAD_LETTERS, METRICS

HERE = PartitionKey("metrics", 0)
LETTER = DeadLetter("read metrics", "garbage", "a-topic", 0, 3, b"x", 1)


class Counter:
    """Writes how often it was fed; remembers when it was closed."""

    log: list[str] = []  # noqa: RUF012 - shared by all, on purpose

    def __init__(self, start: int) -> None:
        self._start = start
        self._fed = 0

    def fold(self, polled: Polled) -> Sequence[Output]:
        self._fed += 1
        return [Output(METRICS, "fed", Metric("fed", self._fed, {}, 0))]

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        return Checkpoint(dict(positions), self._fed)

    def busy(self) -> bool:
        return self._fed == 1

    def close(self) -> None:
        self.log.append(f"closed {self._start}")


class Count:
    def restore(self, restored: Restored) -> Counter:
        Counter.log.append(f"restored {restored.start}")
        return Counter(restored.start)


@pytest.fixture
def fold() -> Iterator[_FoldFn]:
    Counter.log.clear()
    yield _FoldFn(Count())
    close_folds()


def restored(start: int, group: str = "g") -> Restored:
    return Restored(group, start, (), {}, {})


def polled(start: int, position: int = 0, *rejected: DeadLetter, group: str = "g") -> Polled:
    return Polled(group, start, (), rejected, {HERE: position}, True)


def test_each_poll_is_an_emission_with_its_number_and_checkpoint(fold: _FoldFn) -> None:
    assert not list(fold.process(restored(4)))
    emissions = [e for position in (5, 7) for e in fold.process(polled(4, position))]
    assert [(e.group, e.start, e.number) for e in emissions] == [("g", 4, 1), ("g", 4, 2)]
    assert [e.outputs[0].record.step for e in emissions] == [1, 2]
    assert [e.checkpoint for e in emissions] == [Checkpoint({HERE: 5}, 1), Checkpoint({HERE: 7}, 2)]


def test_what_was_rejected_goes_out_with_what_the_poll_gave(fold: _FoldFn) -> None:
    list(fold.process(restored(1)))
    (emission,) = fold.process(polled(1, 4, LETTER))
    assert emission.outputs[0] == Output(DEAD_LETTERS, "a-topic", LETTER)
    assert len(emission.outputs) == 2


def test_a_step_may_tell_of_what_was_rejected_itself() -> None:
    fold = _FoldFn(Count(), dead_letters=False)
    list(fold.process(restored(1)))
    (emission,) = fold.process(polled(1, 4, LETTER))
    assert [output.topic for output in emission.outputs] == [METRICS]
    close_folds()


@pytest.mark.parametrize("starts", [[1], [1, 3]])
def test_polls_of_another_start_are_dropped(fold: _FoldFn, starts: list[int]) -> None:
    assert not list(fold.process(polled(2)))  # before any memory
    for start in starts:
        list(fold.process(restored(start)))
    assert not list(fold.process(polled(2)))
    assert [e.number for e in fold.process(polled(starts[-1]))] == [1]


def test_a_new_start_has_a_new_memory_and_the_old_one_is_closed_once(fold: _FoldFn) -> None:
    for start in (1, 2):
        list(fold.process(restored(start)))
    close_folds()
    close_folds()
    assert Counter.log == ["restored 1", "closed 1", "restored 2", "closed 2"]
    assert not list(fold.process(polled(2)))


class Knot(Counter):
    """A memory in a cycle, as models and optimizers are."""

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.itself = self


class Knots:
    """Notes at each restore how many memories of before are alive."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Knot]] = []
        self.alive: list[int] = []

    def restore(self, restored: Restored) -> Knot:
        self.alive.append(sum(each() is not None for each in self.made))
        knot = Knot(restored.start)
        self.made.append(weakref.ref(knot))
        return knot


def test_old_memory_is_freed_before_the_new_one_is_made() -> None:
    step = Knots()
    fold = _FoldFn(step)
    gc.disable()
    try:
        waiting = []
        for start in (1, 2, 3):
            list(fold.process(restored(start)))
            emissions = iter(fold.process(polled(start)))
            next(emissions)
            waiting.append(emissions)  # as a runner may leave it
    finally:
        gc.enable()
        close_folds()
    assert step.alive == [0, 0, 0]


class Reporter(Counter):
    """Remembers what the process reports while it is at work."""

    said: list[tuple[str, float]] = []  # noqa: RUF012 - shared by all, on purpose

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.report()

    def fold(self, polled: Polled) -> Sequence[Output]:
        self.report()
        return ()

    def report(self) -> None:
        step = LIVENESS.report()["steps"]["g"]
        self.said.append((step["phase"], step["budget_s"]))


def test_restore_and_fold_are_reported_with_their_budgets(fold: _FoldFn) -> None:
    LIVENESS.set_budget("g", StepBudget(restore_s=7.0, fold_s=3.0))
    fold._step = type("Step", (), {"restore": lambda self, restored: Reporter(restored.start)})()
    list(fold.process(restored(1)))
    list(fold.process(polled(1)))
    assert Reporter.said == [("restore", 7.0), ("fold", 3.0)]
    assert not LIVENESS.report()["steps"]
    LIVENESS.clear()


def test_shards_are_apart_and_each_says_whether_it_is_busy(fold: _FoldFn) -> None:
    assert not is_busy("g")
    for group in ("g", "h"):
        list(fold.process(restored(1, group)))
    list(fold.process(polled(1)))
    assert (is_busy("g"), is_busy("h")) == (True, False)
