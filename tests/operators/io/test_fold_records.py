"""FoldRecords: each start has its own state, created by its Restored and applied to its own polls only."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence

import pytest

from infra.runners.liveness import LIVENESS, StepBudget
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored
from operators.io.fold_records import _FoldFn, close_folds, idle_seconds, idle_seconds_of, is_busy
from schemas.records import DeadLetter, Metric
from schemas.topics import DEAD_LETTERS, METRICS

HERE = PartitionKey("metrics", 0)
LETTER = DeadLetter("read metrics", "garbage", "a-topic", 0, 3, b"x", 1)


class PollCounter:
    """Writes how often it was folded; logs when it was closed."""

    log: list[str] = []  # noqa: RUF012 - shared by all, on purpose

    def __init__(self, start: int) -> None:
        self._start = start
        self._polls = 0

    def fold(self, polled: Polled) -> Sequence[Output]:
        self._polls += 1
        return [Output(METRICS, "polls", Metric("polls", self._polls, {}, 0))]

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        return Checkpoint(dict(positions), self._polls)

    def busy(self) -> bool:
        return self._polls == 1

    def close(self) -> None:
        self.log.append(f"closed {self._start}")


class Timed(PollCounter):
    """Its next result is due in `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(1)
        self._seconds = seconds

    def due(self) -> float:
        return self._seconds


class CountPolls:
    def restore(self, restored: Restored) -> PollCounter:
        PollCounter.log.append(f"restored {restored.start}")
        return PollCounter(restored.start)


@pytest.fixture
def fold() -> Iterator[_FoldFn]:
    PollCounter.log.clear()
    yield _FoldFn(CountPolls())
    close_folds()


def restored(start: int, group: str = "g") -> Restored:
    return Restored(group, start, (), {}, {})


def polled(start: int, position: int = 0, *rejected: DeadLetter, group: str = "g") -> Polled:
    return Polled(group, start, (), rejected, {HERE: position}, True)


def test_fold_emits_one_numbered_emission_per_poll(fold: _FoldFn) -> None:
    assert not list(fold.process(restored(4)))
    emissions = [e for position in (5, 7) for e in fold.process(polled(4, position))]
    assert [(e.group, e.start, e.number) for e in emissions] == [("g", 4, 1), ("g", 4, 2)]
    assert [e.outputs[0].record.step for e in emissions] == [1, 2]
    assert [e.checkpoint for e in emissions] == [Checkpoint({HERE: 5}, 1), Checkpoint({HERE: 7}, 2)]


def test_fold_emits_dead_letters_with_the_outputs_of_the_poll(fold: _FoldFn) -> None:
    list(fold.process(restored(1)))
    (emission,) = fold.process(polled(1, 4, LETTER))
    assert emission.outputs[0] == Output(DEAD_LETTERS, "a-topic", LETTER)
    assert len(emission.outputs) == 2


def test_fold_emits_no_dead_letters_if_disabled() -> None:
    fold = _FoldFn(CountPolls(), dead_letters=False)
    list(fold.process(restored(1)))
    (emission,) = fold.process(polled(1, 4, LETTER))
    assert [output.topic for output in emission.outputs] == [METRICS]
    close_folds()


@pytest.mark.parametrize("starts", [[1], [1, 3]])
def test_fold_drops_polls_of_another_start(fold: _FoldFn, starts: list[int]) -> None:
    assert not list(fold.process(polled(2)))  # before any start
    for start in starts:
        list(fold.process(restored(start)))
    assert not list(fold.process(polled(2)))
    assert [e.number for e in fold.process(polled(starts[-1]))] == [1]


def test_fold_creates_state_at_a_start_and_closes_the_old_once(fold: _FoldFn) -> None:
    for start in (1, 2):
        list(fold.process(restored(start)))
    close_folds()
    close_folds()
    assert PollCounter.log == ["restored 1", "closed 1", "restored 2", "closed 2"]
    assert not list(fold.process(polled(2)))


class CyclicState(PollCounter):
    """A state with a reference cycle, as models and optimizers have."""

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.itself = self


class CyclicStates:
    """Records at each restore how many earlier states are alive."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[CyclicState]] = []
        self.alive: list[int] = []

    def restore(self, restored: Restored) -> CyclicState:
        self.alive.append(sum(each() is not None for each in self.made))
        state = CyclicState(restored.start)
        self.made.append(weakref.ref(state))
        return state


def test_fold_frees_the_old_state_before_it_creates_the_new() -> None:
    step = CyclicStates()
    fold = _FoldFn(step)
    gc.disable()
    try:
        waiting = []
        for start in (1, 2, 3):
            list(fold.process(restored(start)))
            emissions = iter(fold.process(polled(start)))
            next(emissions)
            waiting.append(emissions)  # a runner may leave the generator suspended
    finally:
        gc.enable()
        close_folds()
    assert step.alive == [0, 0, 0]


class Reporter(PollCounter):
    """Records what LIVENESS reports during restore and fold."""

    reports: list[tuple[str, float]] = []  # noqa: RUF012 - shared by all, on purpose

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.report()

    def fold(self, polled: Polled) -> Sequence[Output]:
        self.report()
        return ()

    def report(self) -> None:
        step = LIVENESS.report()["steps"]["g"]
        self.reports.append((step["phase"], step["budget_s"]))


def test_liveness_reports_restore_and_fold_with_budgets(fold: _FoldFn) -> None:
    LIVENESS.set_budget("g", StepBudget(restore_s=7.0, fold_s=3.0))
    fold._step = type("Step", (), {"restore": lambda self, restored: Reporter(restored.start)})()
    list(fold.process(restored(1)))
    list(fold.process(polled(1)))
    assert Reporter.reports == [("restore", 7.0), ("fold", 3.0)]
    assert not LIVENESS.report()["steps"]
    LIVENESS.clear()


def test_is_busy_is_separate_for_each_shard(fold: _FoldFn) -> None:
    assert not is_busy("g")
    for group in ("g", "h"):
        list(fold.process(restored(1, group)))
    list(fold.process(polled(1)))
    assert (is_busy("g"), is_busy("h")) == (True, False)
    assert (idle_seconds("g"), idle_seconds("h"), idle_seconds("none")) == (0.0, math.inf, math.inf)


def test_timed_fold_bounds_the_wait_for_input() -> None:
    assert idle_seconds_of(Timed(0.004)) == 0.004
