"""The share of the time in which each role works, which names the bottleneck."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from synthetic_run import START

from pipelines.inspect.run_state.busy import busy_shares, busy_shares_of, busy_text
from pipelines.inspect.run_state.events import PhaseStarted, Tick
from pipelines.inspect.run_state.state import fold_all, new_run
from pipelines.present.report.series import whole_run
from pipelines.present.view.panels import fact_lines
from pipelines.present.view.state_json import state_to_json
from schemas.records import Metric

SECONDS = 100


def measured(at: int) -> list[Metric]:
    """What a run measures `at` seconds after its start: its verifier is slow."""
    time = START + 1000 * at
    return [
        Metric("steps/score", 0, {"time/verify": 0.98 * at, "read/trajectories": 9.0 * at}, time),
        Metric("steps/score", 1, {"time/verify": 0.1 * at}, time),
        Metric("steps/placement", 0, {"time/dispatch": 0.001 * at}, time),
        Metric("steps/rollout", 0, {"time/generate": 0.9 * at}, time),  # its own metric is better
        Metric("rollout", 0, {"rollout/idle_ratio": 0.75}, time),
        Metric("trainer", at, {"time/update": 0.05, "weight_sync/seconds": 0.01, "trajectories": 8.0 * at}, time),
    ]


def events(first: int, last: int) -> list[Any]:
    return [metric for at in range(first, last) for metric in measured(at)]


def test_busiest_role_comes_first_and_is_the_bottleneck() -> None:
    state = fold_all(new_run("r", 80, START), events(0, SECONDS))
    shares = busy_shares(state.busy)
    assert shares == pytest.approx({"score": 0.98, "rollout": 0.25, "trainer": 0.06, "placement": 0.001})
    text = "score 98 % of the last minute (the bottleneck), rollout 25 %, trainer 6 %"
    assert busy_text(shares, "the last minute") == text
    assert dict(fact_lines(state))["busy"] == text
    assert state_to_json(state)["busy"] == shares
    assert busy_shares_of(events(0, SECONDS)) == pytest.approx(shares)
    assert max(map(len, state.busy.values())) <= 64
    whole = whole_run([*events(0, SECONDS), Metric("rollout", 0, {"rollout/tokens": 9e4}, START + 10**5 - 2000)])
    ended = replace(state, busy={}, pace=(), beats={}, whole=whole)
    all_text = "score 98 % of the time between the first step and the last (the bottleneck), rollout 25 %, trainer 6 %"
    assert dict(fact_lines(ended))["busy"] == all_text
    assert state_to_json(ended)["busy"] == pytest.approx(shares)
    speed = (
        "8 trajectories/s   0 tokens/s trained with prompts   909 tokens/s generated, from the first step to the last"
    )
    assert dict(fact_lines(ended))["speed"] == speed


def test_busy_shares_count_restarts_but_no_time_before_a_resume() -> None:
    restarted = [Metric("steps/score", 0, {"time/verify": 5.0}, START + 1000 * (SECONDS + 4))]
    state = fold_all(new_run("r", 80, START), [*events(0, SECONDS), *restarted])
    assert busy_shares(state.busy)["score"] > 0.9
    resumed = fold_all(state, [PhaseStarted("broker", START + 10**6), *events(0, SECONDS)])
    assert busy_shares(resumed.busy) == {}
    assert busy_text({}) == ""


def test_trainer_without_batches_is_idle_since_its_update() -> None:
    state = fold_all(new_run("r", 80, START), events(0, SECONDS))
    later = START + 1000 * SECONDS + 29_000
    for batches, share in ((SECONDS - 1, 0.03), (SECONDS, 0.06)):  # of one that is trained now, nothing is measured
        formed = Metric("experience", batches, {"batches": float(batches)}, later)
        assert fold_all(state, [formed]).busy_shares["trainer"] == pytest.approx(share, rel=0.05)
    assert fold_all(state, [formed, Tick(later + 60_000)]).busy_shares["trainer"] == pytest.approx(0.06)
    trained = replace(formed, values={"batches": SECONDS - 1.0})
    assert fold_all(state, [trained, Tick(later + 60_000)]).busy_shares["trainer"] == 0.0


def test_busy_shares_count_no_time_between_two_parts_of_a_run() -> None:
    later = [replace(metric, measured_at=metric.measured_at + 10**7) for metric in events(0, SECONDS)]
    assert busy_shares_of([*events(0, SECONDS), *later]) == pytest.approx(busy_shares_of(events(0, SECONDS)), rel=0.02)


def test_a_run_of_a_few_seconds_has_no_busy_shares() -> None:
    assert busy_shares_of(events(0, 10)) == busy_shares_of([]) == {}


def test_no_role_is_the_bottleneck_if_all_wait() -> None:
    assert (
        busy_text({"rollout": 0.4, "score": 0.3, "trainer": 0.0}, "the time")
        == "rollout 40 % of the time, score 30 %, trainer 0 %"
    )
