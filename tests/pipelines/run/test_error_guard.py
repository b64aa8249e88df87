"""The guard that stops a run whose trajectories all have errors."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipelines.inspect.run_state.errors import ErrorCounts, error_counts
from pipelines.inspect.run_state.state import RunState, fold, new_run
from pipelines.run.run_guard import ErrorGuard, failing_message, first_error_lines
from schemas.records import Metric

START = 1_000_000


def after(state: RunState, trajectories: int, errors: int, at: int = START + 1) -> RunState:
    values = {"trajectories": float(trajectories), "reward_errors": float(errors)}
    return fold(state, Metric("score", trajectories, values, at))


def stops_at(counts: list[tuple[int, int]], share: float = 1.0, window: int = 10) -> int | None:
    """The trajectories scored when the guard stops the run, given cumulative counts."""
    guard, state = ErrorGuard(share, window), new_run("r", None, START)
    for trajectories, errors in counts:
        state = after(state, trajectories, errors)
        if guard.failing(state) is not None:
            return trajectories
    return None


@pytest.mark.parametrize(
    ("counts", "share", "window", "expected"),
    [
        ([(4, 4), (9, 9)], 1.0, 10, None),  # the window is not full
        ([(4, 4), (10, 10)], 1.0, 10, 10),
        ([(30, 30)], 1.0, 10, 30),
        ([(10, 9), (20, 19)], 1.0, 10, 20),  # it recovers never: the newest ten all failed
        ([(10, 9), (14, 13), (20, 18)], 1.0, 10, None),
        ([(10, 5), (20, 14)], 0.9, 10, 20),
        ([(10, 5), (20, 13)], 0.9, 10, None),
        ([(100, 100)], 1.0, 0, None),  # disabled
    ],
)
def test_guard_stops_at_the_share_of_the_window(
    counts: list[tuple[int, int]], share: float, window: int, expected: int | None
) -> None:
    assert stops_at(counts, share, window) == expected


def test_guard_ignores_errors_of_held_out_answers() -> None:
    """A version that is gone fails them all, which is no reason to stop training."""
    guard, state = ErrorGuard(1.0, 10), new_run("r", None, START)
    for scored in (5, 128):
        values = {"trajectories": 3.0, "heldout_trajectories": float(scored), "heldout_errors": float(scored)}
        state = fold(state, Metric("score", scored + 3, values, START + scored))
        assert guard.failing(state) is None


@pytest.mark.parametrize("skew_ms", [-3_600_000, 0, 3_600_000])
def test_guard_counts_errors_after_the_log_of_its_start(skew_ms: int) -> None:
    """Whatever the clock of the machine that scores."""
    guard, at = ErrorGuard(1.0, 10), START + 7_200_000 + skew_ms
    state = after(new_run("r", None, START), 50, 50, at)
    assert guard.failing(state, earlier=True) is None
    state = after(state, 70, 70, at)  # scored before the start, read after it
    assert guard.failing(state, earlier=True) is None
    assert guard.failing(after(state, 79, 79, at)) is None
    assert guard.failing(after(state, 81, 81, at)) == ErrorCounts(11, 11)


def test_guard_message_names_share_settings_and_command() -> None:
    message = failing_message(ErrorCounts(64, 60, 4), Path("runs/first"))
    for expected in (
        "100 % of 64 trajectories (rewards 60, episodes 4)",
        "run.stop_error_share",
        "laminar topics find experiences --run first -w \"reward_error != ''\"",
    ):
        assert expected in message


def test_first_error_has_the_traceback_of_its_place() -> None:
    def row(name: str, error: str | None, at: int = START) -> dict[str, Any]:
        return {"trajectory_id": name, "reward_error": error, "scored_at": datetime.fromtimestamp(at / 1000, UTC)}

    rows = [
        row("p0.0", "old\n  File a", START - 1),
        row("p1.0", None),
        row("e4.0", "mine: KeyError: 'a' (mine.py:3)\n  F"),
        row("p2.0", "mine: KeyError: 'b' (mine.py:3)"),
        row("p3.0", "mine: TypeError (mine.py:7)\n  G"),
    ]
    first = "The first error, of trajectory p2.0: mine: KeyError: 'b' (mine.py:3)"
    assert first_error_lines(rows, START) == [first, "  F"]
    assert first_error_lines(rows[3:4], START) == [first]
    assert first_error_lines(rows[4:], START) == [
        "The first error, of trajectory p3.0: mine: TypeError (mine.py:7)",
        "  G",
    ]
    assert first_error_lines(rows[:2], START) == []
    assert first_error_lines([row("e4.0", "generation failed"), *rows[:2]], START) == []


def test_error_counts_are_those_of_all_shards_of_score() -> None:
    state = new_run("r", None, START)
    for shard, trajectories in ((0, 4), (1, 5), (0, 6)):
        values = {"trajectories": float(trajectories), "reward_errors": 2.0, "shard": float(shard)}
        state = fold(state, Metric("score", trajectories, values, START))
    assert error_counts(state.score) == ErrorCounts(11, 4)
