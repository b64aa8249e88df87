"""What a summary has of rewards: errors by task, episodes of environments, equal rewards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import START, evaluation_metric, history

from pipelines.inspect.run_state.state import fold_all, new_run
from pipelines.present.report.closing import closing_lines
from pipelines.present.report.html import page
from pipelines.present.report.summary import RunFacts, facts_of, summary_of
from pipelines.present.report.verdict import error_verdict, training_verdict
from pipelines.present.view.text import run_line
from schemas.metric_labels import labelled
from schemas.records import Metric

FACTS = RunFacts("sums")


def test_summary_has_turns_and_endings_of_episodes() -> None:
    endings = {labelled("episode_endings", ending=ending): count for ending, count in (("turns", 10.0), ("done", 30.0))}
    score = Metric("score", 40, {"trajectories": 40.0, "episodes": 40.0, "episode_turns": 150.0, **endings}, START)
    summary = summary_of([score], FACTS)
    assert summary["episodes"] == {"episodes": 40, "turns_mean": 3.75, "endings": {"done": 30, "turns": 10}}
    text = closing_lines(Path("runs/sums"), summary)
    assert re.search(r"\n  turns +3\.75   mean of 40 episodes; ended: done 30, turns 10\n", text)
    assert "<td>turns of an episode</td><td>3.8</td>" in page(summary, [], None, "", Path("runs/sums"))
    assert summary_of(list(history()), FACTS)["episodes"] is None


def test_summary_has_kl_and_speed_between_first_and_last_step() -> None:
    def beat(at_s: int, tokens: float, incarnation: float = 1.0) -> Metric:
        values = {"incarnation": incarnation, "tokens_generated": tokens}
        return Metric("replica", 0, values, START + 1000 * at_s)

    def step(number: int, at_s: int) -> Metric:
        values = {"trajectories": 8.0 * number, "kl/ref": 0.1 * number, "kl/mismatch": 0.25}
        return Metric("trainer", number, values, START + 1000 * at_s)

    started = [beat(50, 900.0), step(1, 60), beat(68, 1900.0)]
    resumed = [beat(140, 0.0, 2.0), beat(150, 1000.0, 2.0), step(2, 150), beat(200, 9000.0, 2.0)]  # stopped for 72 s
    summary = summary_of([*started, *resumed], FACTS)
    assert summary["tokens_per_s"] == round(2000 / 18, 1)
    assert (summary["kl_reference_first"], summary["kl_reference_last"]) == (pytest.approx(0.1), pytest.approx(0.2))
    assert summary["kl_mismatch"] == 0.25
    assert summary_of(started, FACTS)["tokens_per_s"] is None


def test_summary_and_line_name_the_levels_of_a_curriculum() -> None:
    def levels(step: int, **of: float) -> Metric:
        named = {labelled("curriculum/level", task=task): level for task, level in of.items()}
        return Metric("experience", step, {**named, labelled("curriculum/success", task="sums"): 0.5}, START)

    metrics = [levels(0, sums=0.0, gcd=1.0), levels(1, sums=1.0, gcd=1.0), levels(2, sums=2.0, gcd=1.0)]
    summary = summary_of(metrics, FACTS)
    assert summary["curriculum_levels"] == {"sums": [0, 1, 2], "gcd": [1]}
    text = closing_lines(Path("runs/sums"), summary)
    assert re.search(
        r"\n  curriculum level +sums 0 → 2, gcd 1 \(from 0\); rewards of several levels are not compa", text
    )
    trained = Metric("trainer", 3, {"reward/mean": 0.5}, START)
    assert "mean reward 0.50  curriculum level sums 2, gcd 1  " in run_line(
        fold_all(new_run("sums", 9, START), [*metrics, trained])
    )
    one = Metric("experience", 0, {"curriculum/level": 1.0}, START)
    assert summary_of([one], FACTS)["curriculum_levels"] == {"": [1]}
    assert "curriculum level" not in closing_lines(Path("runs/sums"), summary_of(list(history()), FACTS))


def test_summary_lists_a_task_that_only_failed() -> None:
    tasks = {"sums": (104.0, 0.0), "guess": (88.0, 88.0)}
    values = {"trajectories": 192.0, "episode_errors": 88.0}
    for task, (scored, errors) in tasks.items():
        values |= {labelled("trajectories", task=task): scored, labelled("errors", task=task): errors}
    values[labelled("first_error", task="guess", text="KeyError: 'target' (env.py:9)")] = 1.0
    trained = Metric("experience", 1, {labelled("trajectories", task="sums"): 32.0}, START)
    summary = summary_of([trained, Metric("score", 192, values, START)], FACTS)
    assert list(summary["tasks"]) == ["sums", "guess"]
    assert summary["tasks"]["guess"]["trajectories_trained"] == 0
    text = closing_lines(Path("runs/sums"), summary)
    assert re.search(r"\n  guess\n +trained +0   no trajectory of this task\n", text)
    assert "(episodes 88), task guess 88 of 88: KeyError: 'target' (env.py:9). They were not trained. `" in text


@pytest.mark.parametrize(
    ("rewards", "deviation", "constant"), [((0, 0), 0.0, 0.0), ((0, 1), 0.0, None), ((0, 0), 0.1, None)]
)
def test_report_shows_that_all_rewards_were_equal(rewards: Any, deviation: float, constant: float | None) -> None:
    values = [{"reward/mean": float(each), "reward/std": deviation} for each in rewards]
    metrics = [Metric("trainer", step, each, START) for step, each in enumerate(values, 1)]
    summary = summary_of(metrics, RunFacts("r"))
    assert summary["reward_constant"] == constant
    text = training_verdict({**summary, "reward_first": 0.0, "reward_last": 0.0, "trajectories_trained": 40})
    equal = "All rewards were equal (0.00), so nothing could be learned: give partial credit"
    assert text.startswith(equal) if constant is not None else equal not in text and "may be noise" in text


def test_summary_has_the_failure_share_of_an_unmeasured_round() -> None:
    values = {"final": 0.0, "questions": 48.0, "unanswered/greedy": 16.0, "failed/greedy": 16.0}
    failing = summary_of([Metric("evaluation", 0, values, START)], RunFacts("r"))
    assert failing["heldout_unmeasured"] == ["version 0 greedy (48 of 64 answers, 25 % failed)"]


@pytest.mark.parametrize(("on_error", "effect"), [("", "were not trained."), ("on_error = -1.0", "score.on_error")])
def test_verdict_states_whether_failures_were_trained(on_error: str, effect: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f"[score]\n{on_error}\n")
    (tmp_path / "state.json").write_text("{}")
    facts = facts_of(tmp_path, None, {})
    metric = Metric("score", 8, {"trajectories": 8.0, "reward_errors": 2.0}, START)
    assert effect in (error_verdict(summary_of([metric], facts), tmp_path) or "")


def test_report_shows_that_version_zero_was_not_evaluated() -> None:
    late, whole = (summary_of([evaluation_metric(first, "greedy", 0.2)], RunFacts("r")) for first in (3, 0))
    assert "the first evaluation is of version 3" in closing_lines(Path("runs/r"), late)
    assert "not evaluated" not in closing_lines(Path("runs/r"), whole)


def test_report_of_a_role_in_the_foreground_has_no_restarts(tmp_path: Path) -> None:
    (tmp_path / "submitted").mkdir()
    (tmp_path / "submitted" / "score.toml").write_text("")
    assert facts_of(tmp_path, None, {}).restarts == {"score": 0}
