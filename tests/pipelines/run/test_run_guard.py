"""The guard that stops a run for errors or refused rows, under a supervisor and in a submitted role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import heartbeat

from pipelines.config import Config, parse_config
from pipelines.inspect.run_state.events import LagMeasured, RolesChanged, RoleState, Tick
from pipelines.inspect.run_state.state import RunState, fold, fold_all, new_run
from pipelines.inspect.run_state.waiting import SILENT_MS, is_over
from pipelines.run import run_guard
from pipelines.run.run_guard import END_MS, MIN_DRAWN, SHARD_AGE_MS, RunFailing, RunGuard
from schemas.records import Metric

START = 1_000_000
FILE = Path("runs/first/submitted/prompts.toml")


def config_of(**prompts: object) -> Config:
    return parse_config({"run": {"name": "first"}, "prompts": {"task": "gcd", **prompts}}, "test")


def no_experiences(since_ms: int) -> list[Mapping[str, Any]]:
    return []


def state_of(drawn: int, share: float) -> RunState:
    values = {"prompts": 9.0, "drawn/gcd": float(drawn), "refused_share/gcd": share, "refused/too long": 30.0}
    return fold(new_run("r", None, START), Metric("prompts", 9, values, START + 1))


@pytest.mark.parametrize(
    ("drawn", "share", "accepted", "stops"),
    [
        (MIN_DRAWN, 0.06, 0.05, True),
        (MIN_DRAWN, 0.05, 0.05, False),
        (MIN_DRAWN - 1, 0.5, 0.05, False),  # too few to judge
        (MIN_DRAWN, 0.06, 0.1, False),
    ],
)
def test_guard_stops_a_run_with_too_many_refused_rows(drawn: int, share: float, accepted: float, stops: bool) -> None:
    guard = RunGuard(config_of(max_refused_share=accepted), FILE, START)
    if not stops:
        guard.check(state_of(drawn, share), no_experiences)
        return
    with pytest.raises(RunFailing) as failure:
        guard.check(state_of(drawn, share), no_experiences)
    for expected in (
        "6.0 % of the rows of task 'gcd' are refused, more than prompts.max_refused_share = 0.05",
        "refused so far: 30 rows (too long 30)",
        "laminar topics dlq list --run first` lists them",
        "laminar runs resume --run first --set prompts.max_refused_share=0.07",
    ):
        assert expected in str(failure.value)
    assert failure.value.resume == "--set prompts.max_refused_share=0.07"


def test_guard_names_the_file_for_a_task_of_a_mixture() -> None:
    guard = RunGuard(config_of(tasks=[{"name": "gcd", "max_refused_share": 0.01}]), FILE, START)
    with pytest.raises(
        RunFailing, match=r"max_refused_share = 0\.03 of this task in runs/first/submitted/prompts\.toml$"
    ):
        guard.check(state_of(MIN_DRAWN, 0.02), no_experiences)


def test_guard_stops_a_run_without_questions_or_trajectories() -> None:
    values = {"prompts": 9.0, 'drawn{task="gcd"}': 9.0, "exhausted": 1.0}
    scored = Metric("score", 36, {"trajectories": 36.0}, START)
    idle = replace(heartbeat(0, START, 0), running=0, waiting=0)
    state = fold_all(new_run("r", 8, START), [Metric("prompts", 9, values, START), scored, idle])
    seconds = 0.0
    guard = RunGuard(config_of(epochs=1, size=20), FILE, START, lambda: seconds)
    guard.check(state, no_experiences)
    guard.check(fold(state, Tick(START + 9 * END_MS)), no_experiences)  # the clock of another machine
    seconds = END_MS / 1000
    guard.check(fold_all(state, [Tick(START + END_MS), heartbeat(0, START + END_MS, 1)]), no_experiences)  # one runs
    guard.check(state, no_experiences)
    seconds *= 2
    guard.check(fold(state, LagMeasured({"prompts": 1})), no_experiences)  # placement is down, or restores its state
    guard.check(fold(state, RolesChanged({"experience": RoleState(1, 0, "starting")})), no_experiences)
    guard.check(state, no_experiences)
    seconds *= 2
    with pytest.raises(RunFailing, match="after 0 of 8 optimizer steps: all 9 questions are drawn") as failure:
        guard.check(state, no_experiences)
    assert failure.value.resume == "--set prompts.epochs=2"


def test_run_is_over_without_a_replica_that_is_lost() -> None:
    """Placement has given its work to others; nobody reads its inbox."""
    drawn, scored = Metric("prompts", 9, {"exhausted": 1.0}, START), Metric("score", 36, {"trajectories": 36.0}, START)
    lag, later = LagMeasured({"inbox": 3}, {0: 0, 1: 3}), START + int(SILENT_MS)
    idle = [replace(heartbeat(0, at, 0), running=0, waiting=0) for at in (START, later)]
    state = fold_all(new_run("r", 8, START), [drawn, scored, idle[0], heartbeat(1, START, 0), lag])
    assert not is_over(fold(state, Tick(later - 1)))
    state = fold_all(state, [Tick(later), idle[1]])
    assert is_over(state)
    assert not is_over(fold(state, LagMeasured({"inbox": 3}, {0: 3, 1: 0})))
    assert not is_over(fold_all(state, [heartbeat(1, START, 0), lag]))  # its clock is slow


def test_guard_reads_experiences_since_errors_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic of a long run is not read whole, while the supervisor waits."""
    started, later = new_run("r", None, START), START + 10 * SHARD_AGE_MS
    config = parse_config({"run": {"name": "first", "stop_error_window": 8}}, "test")
    guard, read = RunGuard(config, FILE, START), []

    def scored(trajectories: int, errors: int, at: int) -> RunState:
        values = {"trajectories": float(trajectories), "reward_errors": float(errors)}
        return fold(started, Metric("score", trajectories, values, at))

    guard.check(scored(100, 2, START), no_experiences, earlier=True)
    guard.check(scored(200, 2, later), no_experiences)
    monkeypatch.setattr(run_guard, "VISIBLE_PAUSES_S", ())
    with pytest.raises(RunFailing):
        guard.check(scored(208, 10, later + 5), lambda since: read.append(since) or [])
    assert read == [later - SHARD_AGE_MS]


def test_guard_waits_for_an_experience_that_a_metric_precedes() -> None:
    """Kafka ends a transaction in one topic after the other."""
    config = parse_config({"run": {"name": "first", "stop_error_window": 8}}, "test")
    guard, started = RunGuard(config, FILE, START), new_run("r", None, START)
    scored_at = datetime.fromtimestamp(START / 1000 + 1, UTC)
    row = {"trajectory_id": "t0.0", "reward_error": "fails: KeyError: 'answr' (mine.py:2)", "scored_at": scored_at}
    reads = iter([[], [], [row]])
    guard.check(started, no_experiences)
    state = fold(started, Metric("score", 8, {"trajectories": 8.0, "reward_errors": 8.0}, START + 1))
    with pytest.raises(RunFailing) as raised:
        guard.check(state, lambda since: next(reads))
    assert list(raised.value.detail_lines) == [
        "The first error, of trajectory t0.0: fails: KeyError: 'answr' (mine.py:2)"
    ]
