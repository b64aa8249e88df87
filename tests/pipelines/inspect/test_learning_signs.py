"""Warnings of runs that do not learn, from the metrics of their updates."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from synthetic_run import START, trainer_metric

from pipelines.inspect.run_state.events import PhaseStarted
from pipelines.inspect.run_state.learning import EQUAL as EQUAL_REWARDS
from pipelines.inspect.run_state.learning import WARN_STEPS, learning_signs, learning_summary, learning_warnings
from pipelines.inspect.run_state.state import fold, fold_all, new_run
from pipelines.present.view.live import LiveView
from pipelines.present.view.panels import fact_lines
from pipelines.present.view.text import run_line
from schemas.records import Metric

GOOD = {"grad_norm": 0.5, "frac_reward_zero_std": 0.25}
EQUAL = {"grad_norm": 0.0, "frac_reward_zero_std": 1.0}
ZERO = {"grad_norm": 0.0, "frac_reward_zero_std": 0.5}
RARE = {"grad_norm": 0.5, "frac_reward_zero_std": 0.95}
CUT = {**GOOD, "response_length/clip_ratio": 0.97}
MISMATCHED = {**GOOD, "mismatch/above_bound": 1.0}
UNCLIPPED = {**GOOD, "clip_ratio/low": 0.0, "clip_ratio/high": 0.0}
FEW, ENOUGH = WARN_STEPS - 1, WARN_STEPS


@pytest.mark.parametrize(
    ("updates", "newest", "whole"),
    [
        ([GOOD] * 50, "", ""),
        ([EQUAL] * FEW, "", ""),
        ([EQUAL] * ENOUGH, "rewards do not differ", "rewards do not differ"),
        ([{**EQUAL, "reward/mean": 0.0}] * ENOUGH, "every reward is 0", "every reward is 0"),
        ([ZERO] * ENOUGH, "the gradient was 0", "the gradient was 0"),
        ([*[ZERO] * ENOUGH, GOOD], "", "the gradient was 0"),
        ([*[ZERO] * FEW, GOOD, *[ZERO] * FEW], "", ""),
        ([UNCLIPPED] * ENOUGH, "", "the clip never acted"),
        ([UNCLIPPED] * FEW, "", ""),
        ([*[UNCLIPPED] * ENOUGH, {**GOOD, "clip_ratio/high": 0.01}], "", ""),
        ([{"reward/mean": 0.5}] * 50, "", ""),  # an emulated trainer
        ([RARE] * ENOUGH, "rewards do not differ within 90 % of the groups", "rewards do not differ within 90 %"),
        ([RARE] * FEW, "", ""),
        ([*[RARE] * ENOUGH, GOOD], "", "rewards do not differ within 90 % of the groups"),
        ([MISMATCHED] * ENOUGH, "the logprobs of rollout and trainer differed", "the logprobs of rollout and trainer"),
        ([*[MISMATCHED] * FEW, GOOD], "", ""),
        (
            [{**GOOD, "skipped_updates": 3.0}] * 300,
            "3 optimizer steps had no effect",
            "3 optimizer steps had no effect",
        ),
        ([{**GOOD, "skipped_updates": 3.0}] * 301, "", ""),
        ([CUT] * ENOUGH, "90 % of the responses or more are cut at their limit", "90 % of the responses or more"),
    ],
)
def test_signs_warn_after_enough_updates(updates: list[dict[str, float]], newest: str, whole: str) -> None:
    signs = learning_signs(updates)
    assert [each[: len(newest)] for each in learning_warnings(signs).values()] == ([newest] if newest else [])
    assert [each[: len(whole)] for each in learning_summary(signs)] == ([whole] if whole else [])


def test_signs_warn_after_the_configured_number_of_updates() -> None:
    signs = learning_signs([ZERO] * 3, warn_steps=3)
    (warning,) = learning_warnings(signs).values()
    assert warning.startswith("the gradient was 0 in the last 3 optimizer steps")
    state = fold_all(new_run("r", 80, START, 4), [Metric("trainer", step, ZERO, START) for step in (1, 2, 3)])
    assert not list(learning_warnings(state.signs))


def test_warnings_are_in_line_and_screen_and_count_a_step_once() -> None:
    steps = [Metric("trainer", step, EQUAL, START + step) for step in range(1, ENOUGH + 1)]
    repeated = [each for each in steps for _ in range(2)]
    assert "warning" not in run_line(fold_all(new_run("r", 80, START), repeated[:-2]))
    state = fold_all(new_run("r", 80, START), repeated)
    assert "1 warning" in run_line(state)
    text = f"rewards do not differ within any group in the last {ENOUGH} optimizer steps"
    assert text in learning_warnings(fold_all(state, steps).signs)[EQUAL_REWARDS]  # a resumed trainer makes them again
    assert "rewards do not differ" in dict(fact_lines(state))["warning"]
    assert not list(learning_warnings(fold_all(state, [trainer_metric(ENOUGH + 1)]).signs))


def test_live_view_without_terminal_prints_a_warning_once() -> None:
    updates = [
        Metric("trainer", step, {"grad_norm": float(step > 12), "reward/mean": 0.5}, START) for step in range(1, 14)
    ]
    state = fold(fold_all(new_run("sums", 80, START, 10), updates[:9]), PhaseStarted("checks", START))
    out = io.StringIO()
    with LiveView(Console(file=out), "sums", 80, line_every_s=0) as view:
        view.update(state)  # of a resumed run
        state = fold(state, PhaseStarted("training", START))
        for update in updates[9:]:
            state = fold(state, update)
            view.update(state)
    lines = out.getvalue().splitlines()
    assert "9/80 steps  waits for" in lines[1]
    assert [each[:50] for each in lines if "warning" in each and "[" not in each] == [
        "warning: the gradient was 0 in the last 10 optimiz",
        "warning ended at step 13: zero gradients",
    ]
    assert ["1 warning" in each for each in lines if "training " in each] == [True, True, True, False]
