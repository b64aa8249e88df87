"""The fold of a run's events into its state, and curves of bounded size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from synthetic_run import GROUP_BATCH, START, STEP_MS, evaluation_metric, heartbeat, history, manifest, trainer_metric

from pipelines.inspect.metrics_file import replica_metric
from pipelines.inspect.run_state.curve import MAX_POINTS, NO_POINTS, Curve, Point
from pipelines.inspect.run_state.events import LagMeasured, PhaseStarted, RolesChanged, RoleState, Tick
from pipelines.inspect.run_state.pace import POINTS
from pipelines.inspect.run_state.rates import progress, rates, seconds_left
from pipelines.inspect.run_state.state import (
    RunState,
    fold,
    fold_all,
    new_run,
)
from pipelines.inspect.run_state.waiting import waiting_for
from pipelines.present.view.panels import fact_lines
from pipelines.present.view.text import eta
from schemas.records import Metric, PolicyVersion, RelayArrival, RelayStatus

NEW = new_run("r", 80, START)


def after(*events: Any) -> RunState:
    return fold_all(NEW, events)


@pytest.mark.parametrize(
    ("events", "field", "expected"),
    [
        ([], "phase", "starting"),
        ([PhaseStarted("training", START + 5)], "phase", "training"),
        (
            [PhaseStarted("a", 1), PhaseStarted("a", 2), PhaseStarted("b", 3)], "phases",
            (PhaseStarted("a", 1), PhaseStarted("b", 3)),
        ),
        ([trainer_metric(3)], "step", 3),
        ([trainer_metric(3)], "trajectories_trained", 3 * GROUP_BATCH),
        ([], "trajectories_trained", None),
        ([Tick(START + 9), Tick(START + 4)], "now", START + 9),
        ([LagMeasured({"inbox": 4}), LagMeasured({"batches": 1})], "lag", {"batches": 1}),
        ([LagMeasured({"prompts": 65, "relay": 78, "replicas": 44, "trajectories": 2})], "lag", {"trajectories": 2}),
        ([trainer_metric(3)], "phase", "training"),
        ([RolesChanged({"a": RoleState(1, 2, "up")})], "roles", {"a": RoleState(1, 2, "up")}),
        ([RelayStatus(0, ("1.2",), 5, "h", 6, START + 7)], "now", START + 7),
        ([RelayArrival(0, "h", "/s", None, (), 0.0, -1.0, START + 7)], "now", START + 7),
        ([Metric("weather", 1, {"rain": 1.0}, START + 9)], "last_metric_at", {}),
        ([Metric("score", 1, {"errors": 2.0}, START + 9)], "last_metric_at", {"score": START + 9}),
        # tokens of two incarnations add up; a late heartbeat of the first changes nothing
        ([heartbeat(0, 1, 50), heartbeat(0, 2, 70), heartbeat(1, 2, 5)], "tokens_generated", 75),
        ([heartbeat(0, 1, 70), heartbeat(0, 2, 10, incarnation=2), heartbeat(0, 3, 71)], "tokens_generated", 80),
        ([], "tokens_generated", None),
        # all that were published, also before the first that is read; none twice
        ([manifest(1, 4), manifest(1, 4), manifest(2, 7)], "versions", 8),
        ([manifest(1, 0), manifest(2, 3)], "version", PolicyVersion(2, 3)),
    ],
)  # fmt: skip
def test_fold_updates_state(events: list[Any], field: str, expected: object) -> None:
    assert getattr(after(*events), field) == expected


def test_fold_rejects_unknown_event() -> None:
    with pytest.raises(TypeError, match="str"):
        fold(NEW, "training")  # type: ignore[arg-type]


def test_fold_merges_greedy_and_sampled_evaluation() -> None:
    state = after(
        evaluation_metric(0, "greedy", 0.2),
        evaluation_metric(20, "greedy", 0.5),
        evaluation_metric(0, "sampled", 0.1),  # late
        evaluation_metric(10, "greedy", 0.4),  # later still
        evaluation_metric(20, "sampled", 0.45, final=True),
    )
    assert state.first_evaluation is not None
    assert state.evaluation is not None
    assert (
        state.first_evaluation.version,
        state.first_evaluation.greedy,
        state.first_evaluation.sampled,
        state.first_evaluation.final,
    ) == (0, 0.2, 0.1, False)
    last = state.evaluation
    assert (last.version, last.greedy, last.sampled, last.questions, last.final) == (20, 0.5, 0.45, 256, True)
    assert [(point.x, point.y) for point in state.greedy.points] == [(0, 0.2), (10, 0.4), (20, 0.5)]


def test_fold_replaces_steps_of_restarted_trainer() -> None:
    state = after(*[trainer_metric(step, 0.1 * step) for step in range(1, 7)])
    again = fold_all(state, [trainer_metric(3, 0.9)])
    assert again.step == 3
    assert [point.x for point in again.reward.points] == [1, 2, 3]
    assert again.reward.last == Point(3, 0.9, 1)
    assert rates(state).steps == pytest.approx(1000 / STEP_MS)
    assert rates(again).steps is None  # until it has made several steps


def test_rates_and_seconds_left() -> None:
    state = after(
        *[trainer_metric(step) for step in range(1, 41)], heartbeat(0, START, 100), heartbeat(0, START + 5000, 1100)
    )
    speed = rates(state)
    assert len(state.pace) == POINTS
    assert speed.steps == pytest.approx(1000 / STEP_MS)
    assert speed.trajectories == pytest.approx(GROUP_BATCH * 1000 / STEP_MS)
    assert speed.tokens_trained == pytest.approx(4_000 * 1000 / STEP_MS)
    assert speed.tokens_generated == pytest.approx(200)
    assert progress(state) == 0.5
    assert seconds_left(state) == pytest.approx(40 * STEP_MS / 1000)
    stopped = replace(heartbeat(0, START + 6000, 1100), state="stopped")
    assert rates(fold(state, stopped)).tokens_generated is None


def test_rates_without_heartbeats_are_those_of_samples() -> None:
    samples = [replica_metric(heartbeat(0, START + 2000 * at, 250 * at)) for at in range(4)]
    assert rates(after(*samples)).tokens_generated == pytest.approx(125)
    assert rates(after(*samples, Tick(START + 60_000))).tokens_generated is None  # it has ended
    restarted = replica_metric(heartbeat(0, START + 8000, 10, incarnation=2))
    assert rates(after(*samples, restarted)).tokens_generated is None  # until it has two samples


def test_resumed_run_has_no_rate_until_it_has_made_steps() -> None:
    state = after(*[trainer_metric(step) for step in range(1, 41)], PhaseStarted("broker", START + 10**6))
    assert (rates(state).steps, seconds_left(state)) == (None, None)
    assert eta(state) == ""
    assert waiting_for(state) == "Kafka"
    starting = fold(state, PhaseStarted("starting", START + 10**6))
    assert waiting_for(starting) == "the roles"
    old = replace(trainer_metric(41), measured_at=START + 10**6 - 1)  # an observer reads it again
    moved = [replace(trainer_metric(step), measured_at=START + 10**6 + step * STEP_MS) for step in range(42, 80)]
    few = fold_all(starting, [old, *moved[:5], PhaseStarted("training", START + 10**6)])
    assert (rates(few).steps, eta(few)) == (None, "ETA -")  # they are too close for a rate
    assert eta(fold(few, Tick(moved[0].measured_at + 8_000))) == "ETA 1:08"  # 4 steps in 8 s, 34 are left
    resumed = fold_all(starting, [old, *moved])
    resumed = fold(resumed, PhaseStarted("training", resumed.now))
    assert rates(resumed).steps == pytest.approx(1000 / STEP_MS)
    assert eta(resumed) == "ETA 0:02"  # rounded up
    assert eta(fold(resumed, replace(moved[-1], step=80))) == ""


def test_resumed_run_has_no_token_rate_of_heartbeats_before() -> None:
    beats = [heartbeat(0, at=START + 1000 * at, tokens=100 * at) for at in range(1, 9)]
    resumed = after(PhaseStarted("broker", START + 10**6), *beats)
    assert (resumed.replicas[0], rates(resumed).tokens_generated) == (beats[-1], None)


def test_ended_run_has_no_lag() -> None:
    lag = LagMeasured({"batches": 12})
    assert after(lag).lag == {"batches": 12}
    assert after(lag, PhaseStarted("stopped", START), lag).lag == {}


def test_rates_count_batch_tokens_of_trainer() -> None:
    metrics = [replace(trainer_metric(step), values={"batch/tokens": 1200.0}) for step in range(1, 7)]
    assert rates(after(*metrics)).tokens_trained == pytest.approx(1000.0)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], 0.0),
        ([PhaseStarted("warm_start", START)], None),
        ([PhaseStarted("warm_start", START), Metric("warm_start", 3, {"progress": 0.3}, START)], 0.3),
        ([PhaseStarted("training", START), Metric("warm_start", 3, {"progress": 1.0}, START)], 0.0),
        ([trainer_metric(200)], 1.0),
    ],
)
def test_progress_is_relative_to_phase(events: list[Any], expected: float | None) -> None:
    assert progress(after(*events)) == expected


def test_progress_is_none_without_goal() -> None:
    state = fold_all(new_run("r", None, START), [trainer_metric(1), trainer_metric(2)])
    assert (progress(state), seconds_left(state)) == (None, None)


def test_fold_does_not_change_earlier_state() -> None:
    first = after(*history(10))
    before = repr(first)
    fold_all(first, [*history(20), heartbeat(0, START, 5), heartbeat(0, START + 1, 6)])
    assert repr(first) == before


def test_state_size_is_bounded() -> None:
    state = fold_all(
        NEW,
        (
            metric
            for step in range(1, 3000)
            for metric in (trainer_metric(step), evaluation_metric(step, "greedy", 0.5))
        ),
    )
    assert len(state.reward) <= MAX_POINTS
    assert len(state.greedy) <= MAX_POINTS
    assert state.reward.last is not None
    assert state.reward.last.x == 2999
    assert sum(point.values for point in state.reward.points) == 2999


def test_curve_keeps_mean_when_full() -> None:
    curve = NO_POINTS
    for x in range(MAX_POINTS + 1):
        curve = curve.add(x, x)
    assert len(curve) == MAX_POINTS // 2 + 1
    assert curve.points[0] == Point(1, 0.5, 2)
    assert curve.points[-1] == Point(MAX_POINTS, MAX_POINTS, 1)
    assert curve.recent_mean(MAX_POINTS) == pytest.approx(MAX_POINTS / 2)
    assert NO_POINTS.recent_mean(3) is None
    assert NO_POINTS.last is None


def test_curve_sorts_late_values() -> None:
    assert [point[:2] for point in NO_POINTS.put(2, 0.2).put(1, 0.1).put(2, 0.3).points] == [(1, 0.1), (2, 0.3)]
    assert Curve((Point(1, 1, 1), Point(2, 2, 1))).add(1, 5).points == (Point(1, 5, 1),)


def test_facts_name_an_idle_trainer_beside_its_last_speed() -> None:
    state = fold_all(new_run("r", 80, START), [trainer_metric(step) for step in range(1, 7)])
    assert "over the last 6 steps" in dict(fact_lines(state))["mean reward"]
    assert "ago" not in dict(fact_lines(state))["speed"]
    assert ", last step 18:00 ago" in dict(fact_lines(fold(state, Tick(state.now + 1_080_000))))["speed"]
