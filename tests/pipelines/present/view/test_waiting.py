"""What a run waits for, and its errors, in the progress line, the screen and the JSON of a state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from synthetic_run import START, heartbeat, trainer_metric

from pipelines.config import parse_config
from pipelines.inspect.run_state.errors import ErrorCounts, errors_text, score_errors_text
from pipelines.inspect.run_state.events import CheckStarted, LagMeasured, PhaseStarted, RolesChanged, RoleState, Tick
from pipelines.inspect.run_state.goal import is_reached
from pipelines.inspect.run_state.state import fold_all, new_run
from pipelines.inspect.run_state.waiting import QUIET_S, waiting_for
from pipelines.present.view.panels import fact_lines
from pipelines.present.view.state_json import state_to_json
from pipelines.present.view.text import run_line
from schemas.metric_labels import labelled
from schemas.records import Metric

UP = RolesChanged({"trainer": RoleState(1, 0, "up"), "score": RoleState(2, 0, "up")})
BEAT = heartbeat(0, START, 0)
BUFFERED = Metric("experience", 0, {"buffer/trajectories": 48.0}, START)
QUEUED = replace(trainer_metric(1), values={"queue/lag": 2.0}, measured_at=START - 60_000)
DROPPED = Metric("experience", 0, {labelled("dropped_since_batch", text="no answer {x}"): 64.0}, START)
LEFT = replace(BUFFERED, values={"buffer/trajectories": 48.0, "buffer/left_out": 32.0})
DRAWN = Metric("prompts", 40, {"exhausted": 1.0, labelled("drawn", task="gcd"): 40.0}, START)
SCORED = Metric("score", 64, {"trajectories": 64.0, "reward_errors": 8.0, "episode_errors": 1.0}, START)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([PhaseStarted("broker", START)], "Kafka"),
        (
            [PhaseStarted("checks", START), Tick(START + 9_000)],
            "the start of the checks of prompts, rewards and environments: libraries are being loaded (9 s)",
        ),
        (
            [PhaseStarted("checks", START), CheckStarted("reward my.py:score", START), Tick(START + 12_900)],
            "the check of reward my.py:score (12 s)",
        ),
        ([PhaseStarted("warm start", START)], "the warm start"),
        ([], "the roles"),
        ([RolesChanged({"light": RoleState(None, 0, "starting")})], "the start of light (the roles without a model)"),
        ([UP], "the first heartbeat of a replica"),
        ([UP, replace(BEAT, state="loading")], "a replica that has loaded weights"),
        ([UP, replace(BEAT, running=0)], "the first prompt at a replica"),
        ([UP, BEAT], "the first optimizer step: 12 trajectories are running"),
        (
            [UP, replace(BEAT, running=0), LagMeasured({"trajectories": 64, "prompts": 9})],
            "the first optimizer step: 64 records of finished trajectories wait for score",
        ),
        (
            [UP, BEAT, SCORED, BUFFERED, LagMeasured({"batches": 16, "experiences": 2}), QUEUED],
            "the next optimizer step: 2 batches wait for the trainer, 48 trajectories are in the buffer, "
            "12 trajectories are running",
        ),
        ([UP, replace(BEAT, running=0), SCORED], "the next prompt at a replica"),
        ([UP, BEAT, SCORED, DRAWN], "the first optimizer step: 12 trajectories are running"),
        ([UP, replace(BEAT, running=0), DRAWN], "the first prompt at a replica"),
        (
            [UP, BEAT, SCORED, DROPPED],
            "the first optimizer step: 64 trajectories were dropped since the last batch (no answer {x}), "
            "12 trajectories are running",
        ),
        (
            [UP, BEAT, SCORED, LEFT],
            "the first optimizer step: 48 trajectories are in the buffer, 32 of them in complete groups that the "
            "sampler does not take, 12 trajectories are running",
        ),
        (
            [UP, replace(BEAT, running=0, waiting=0), SCORED, DRAWN],
            "nothing: all 40 questions are drawn (prompts.epochs)",
        ),
        ([UP, BEAT, SCORED, trainer_metric(1)], None),
        (
            [UP, BEAT, SCORED, trainer_metric(1), Tick(trainer_metric(1).measured_at + int(QUIET_S[0] * 1000))],
            "the next optimizer step: 12 trajectories are running",
        ),
        ([trainer_metric(1), PhaseStarted("final evaluation", START)], "answers to held-out questions under version -"),
        ([trainer_metric(1), PhaseStarted("audit", START)], "the audit of the log"),
    ],
)
def test_run_names_what_it_waits_for(events: list[Any], expected: str | None) -> None:
    state = fold_all(new_run("r", 80, START), events)
    assert waiting_for(state) == expected
    assert (f"waits for {expected}" in run_line(state)) == (expected is not None)
    assert dict(fact_lines(state)).get("waits for") == expected
    assert state_to_json(state)["waits_for"] == expected


@pytest.mark.parametrize(("step_s", "quiet_s"), [(0.5, QUIET_S[0]), (8, 16), (600, QUIET_S[1])])
def test_run_with_slow_steps_waits_longer_in_silence(step_s: float, quiet_s: float) -> None:
    steps = [replace(trainer_metric(step), measured_at=START + int(1000 * step_s * step)) for step in (1, 2, 3)]
    for late_ms, named in ((-1, False), (0, True)):
        now = steps[-1].measured_at + int(1000 * quiet_s) + late_ms
        state = fold_all(new_run("r", 80, START), [UP, BEAT, SCORED, *steps, Tick(now)])
        assert (waiting_for(state) is not None) == named


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (ErrorCounts(64), ""),
        (ErrorCounts(64, 8, 1), "14 % of 64 trajectories (rewards 8, episodes 1)"),
        (ErrorCounts(64, 0, 0, 64), "100 % of 64 trajectories (generation 64)"),
        (ErrorCounts(1000, 999), "99.9 % of 1000 trajectories (rewards 999)"),  # never rounded to 100 %
        (ErrorCounts(1000, 1), "0.1 % of 1000 trajectories (rewards 1)"),
    ],
)
def test_errors_text_names_share_and_kinds(counts: ErrorCounts, expected: str) -> None:
    assert errors_text(counts) == expected


def test_line_and_screen_name_a_failing_task_and_its_error() -> None:
    score = {
        "trajectories": 232.0,
        "episode_errors": 88.0,
        labelled("trajectories", task="easy"): 142.0,
        labelled("trajectories", task="hard"): 90.0,
        labelled("errors", task="hard"): 88.0,
        labelled("first_error", task="hard", text='KeyError: "x" (env.py:3)'): 1.0,
    }
    state = fold_all(new_run("r", 80, START), [Metric("score", 232, score, START)])
    expected = '38 % of 232 trajectories (episodes 88), task hard 88 of 90: KeyError: "x" (env.py:3)'
    assert f"errors {expected}" in run_line(state)
    assert dict(fact_lines(state))["errors"] == expected
    hard = {"trajectories": 90, "errors": 88, "first_error": 'KeyError: "x" (env.py:3)'}
    assert state_to_json(state)["errors_by_task"]["hard"] == hard


def test_errors_of_the_only_task_leave_out_its_name() -> None:
    score = {labelled("trajectories", task="t"): 16, labelled("errors", task="t"): 16}
    first = {labelled("first_error", task="t", text="ValueError: no"): 1}
    assert score_errors_text({"trajectories": 16, "episode_errors": 16, **score, **first}) == (
        "100 % of 16 trajectories (episodes 16), first: ValueError: no"
    )
    assert score_errors_text({"trajectories": 16, "episode_errors": 16}) == "100 % of 16 trajectories (episodes 16)"


def test_refused_rows_are_in_line_screen_and_json() -> None:
    values = {"prompts": 9.0, "rows": 20.0, "refused/too long": 10.0, "refused/no answer": 2.0}
    state = fold_all(new_run("r", 80, START), [Metric("prompts", 9, values, START)])
    assert "refused 12 rows (too long 10, no answer 2)" in run_line(state)
    assert dict(fact_lines(state))["refused"] == "12 rows (too long 10, no answer 2)"
    assert state_to_json(state)["refused_rows"] == {"too long": 10, "no answer": 2}


def test_round_that_is_not_measured_is_in_line_screen_and_json() -> None:
    gone = Metric("evaluation", 0, {"final": 1.0, "questions": 2.0, "unanswered/greedy": 398.0}, START)
    state = fold_all(new_run("r", 80, START), [gone])
    text = "not measured: version 0 greedy (2 of 400 answers)"
    assert "accuracy greedy" not in run_line(state)
    assert text in run_line(state)
    assert text in dict(fact_lines(state))["accuracy"]
    assert state_to_json(state)["heldout_unmeasured"] == text
    again = replace(gone, values={"final": 1.0, "questions": 400.0, "accuracy/greedy": 0.5})
    assert text not in run_line(fold_all(state, [again]))


@pytest.mark.parametrize(
    ("values", "reached"), [({}, False), ({"given_up": 1.0}, True), ({"accuracy/greedy": 0.5}, True)]
)
def test_run_ends_if_its_final_version_cannot_be_measured(values: dict[str, float], reached: bool) -> None:
    settings = {"prompts": {"heldout": 4, "task": "gcd"}, "trainer": {"optimizer_steps": 1}}
    config = parse_config({"run": {"name": "r"}, **settings, "evaluation": {"sampled": False}}, "test")
    last = Metric("evaluation", 1, {"final": 1.0, "questions": 0.0, "unanswered/greedy": 4.0, **values}, START)
    assert is_reached(fold_all(new_run("r", 1, START), [trainer_metric(1), last]), config) == reached


def test_run_waits_for_its_sampled_round_if_greedy_failed() -> None:
    settings = {"prompts": {"heldout": 4, "task": "gcd"}, "trainer": {"optimizer_steps": 1}}
    config = parse_config({"run": {"name": "r"}, **settings}, "test")
    failed = {"final": 1.0, "questions": 2.0, "unanswered/greedy": 2.0, "failed/greedy": 2.0, "given_up": 1.0}
    state = fold_all(new_run("r", 1, START), [trainer_metric(1), Metric("evaluation", 1, failed, START)])
    assert not is_reached(state, config)
    sampled = Metric("evaluation", 1, {"final": 1.0, "questions": 4.0, "accuracy/sampled": 0.5}, START)
    assert is_reached(fold_all(state, [sampled]), config)


def test_errors_are_in_line_screen_and_json() -> None:
    state = fold_all(new_run("r", 80, START), [SCORED])
    text = "14 % of 64 trajectories (rewards 8, episodes 1)"
    assert f"errors {text}" in run_line(state)
    assert dict(fact_lines(state))["errors"] == text
    data = state_to_json(state)
    assert data["error_share"] == 9 / 64
    assert data["errors"] == {"trajectories": 64, "reward_errors": 8, "episode_errors": 1, "generation_errors": 0}
