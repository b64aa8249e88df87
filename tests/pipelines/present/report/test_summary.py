"""The summary of a synthetic run, its verdicts, and the closing lines."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import GROUP_BATCH, START, STEPS, evaluation_metric, history, trainer_metric

from pipelines.inspect.metrics_file import UNREADABLE, MetricsFile, by_topic, read_metrics
from pipelines.inspect.run_folders import laminar_command
from pipelines.present.report.charts import charts
from pipelines.present.report.closing import closing_lines
from pipelines.present.report.machine import cpu_model, describe_machine, package_versions
from pipelines.present.report.series import batches, evaluations, mean_between, newest_by_step, staleness_histogram
from pipelines.present.report.summary import RunFacts, summarise, summary_of
from pipelines.present.report.verdict import audit_verdict, training_verdict, warm_start_verdict
from schemas.metric_labels import labelled
from schemas.records import Metric

FACTS = RunFacts(
    "sums",
    reached=True,
    seed=3,
    wall_seconds=133.2,
    goal=STEPS,
    phases={"warm start": 12.0, "training": 100.0},
    audit={"passed": True, "lost": 0, "trained_twice": 0, "in_flight_by_stage": {}},
    restarts={"rollout-0": 1, "score": 0},
)


def test_summary_of_metrics_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.append(history())
    summary = summary_of(read_metrics(path), FACTS)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    tenth = STEPS // 10
    rewards = [trainer_metric(step).values["reward/mean"] for step in range(1, STEPS + 1)]
    assert summary["reward_first"] == pytest.approx(sum(rewards[:tenth]) / tenth)
    assert summary["reward_last"] == pytest.approx(sum(rewards[-tenth:]) / tenth)
    expected = {
        "run": "sums",
        "heldout_before": 0.24,
        "heldout_after": pytest.approx(0.86),
        "heldout_sampled_before": 0.2,
        "heldout_sampled_after": pytest.approx(0.81),
        "heldout_warm_start_best": 0.94,
        "heldout_questions": 256,
        "trajectories_trained": STEPS * GROUP_BATCH,
        "optimizer_steps": STEPS,
        "weight_versions": 81,
        "staleness_mean": pytest.approx(0.8),
        "staleness_max": 3,
        "over_age": 16 * STEPS,
        "staleness_histogram": {"0": 40 * STEPS, "1": 72 * STEPS, "2": 16 * STEPS},
        "staleness_at_finish_histogram": {"0": 100 * STEPS, "1": 28 * STEPS},
        "dropped_share_by_length_decile": [decile / 100 for decile in range(1, 11)],
        "tokens_generated": 2 * 900 * STEPS,
        "wall_seconds": 133.2,
        "phases": {"warm start": 12.0, "training": 100.0},
        "lost": 0,
        "trained_twice": 0,
        "audit_passed": True,
        "seed": 3,
        "restarts": {"rollout-0": 1, "score": 0},
    }
    assert {key: summary[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("errors", "stop", "headline", "verdict"),
    [
        (0, None, "reached its goal", None),
        (32, None, "reached its goal", "Errors in 50 % of 64 trajectories (rewards 32). They were not trained. `"),
        (64, None, "FAILED: its trajectories have errors", "Errors in 100 % of 64 trajectories (rewards 64)."),
        (32, 0.5, "FAILED: its trajectories have errors", "Errors in 50 %"),
    ],
)
def test_closing_never_praises_a_run_of_errors(
    errors: int, stop: float | None, headline: str, verdict: str | None
) -> None:
    early = Metric("score", 8, {"trajectories": 8.0, "reward_errors": 0.0}, START)
    late = Metric("score", 64, {"trajectories": 64.0, "reward_errors": float(errors)}, START + 1)
    summary = summary_of([*history(), early, late], replace(FACTS, stop_error_share=stop))
    assert summary["error_share"] == errors / 64
    text = closing_lines(Path("runs/sums"), summary)
    assert f"Run sums {headline}: " in text
    assert ("Errors in" in text) == (verdict is not None)
    assert verdict is None or verdict in text


def test_closing_names_refused_rows_and_signs_of_not_learning() -> None:
    refused = Metric("prompts", 9, {"prompts": 9.0, "refused/too long": 10.0}, START)
    flat = [Metric("trainer", step, {"grad_norm": 0.0, "frac_reward_zero_std": 1.0}, START) for step in range(1, 12)]
    summary = summary_of([refused, *flat], FACTS)
    assert summary["refused_rows"] == {"too long": 10}
    text = closing_lines(Path("runs/sums"), summary)
    assert (
        f"Refused rows of the prompts: too long 10; `{laminar_command()} topics dlq list --run sums` lists them."
        in text
    )
    assert "Warning: rewards do not differ within any group in up to 11 optimizer steps" in text


def test_summary_of_unknown_run_is_null() -> None:
    summary = summary_of([], RunFacts("empty"))
    empty: tuple[Any, ...] = (None, {})
    assert {key for key, value in summary.items() if value not in empty} == {"run"}
    assert "heldout_before" in summary
    assert "No trajectory was trained." in closing_lines(Path("runs/empty"), summary, Path("my.toml"))


def test_summary_adds_unreadable_records() -> None:
    found = [by_topic(UNREADABLE, {"metrics": 2}, START), by_topic(UNREADABLE, {"metrics": 1, "relay": 1}, START + 1)]
    assert summary_of(found, RunFacts("r"))["unreadable_records"] == {"metrics": 3, "relay": 1}


def test_summary_counts_repeated_step_once() -> None:
    metrics = [trainer_metric(1, 0.0), trainer_metric(2, 0.0)]
    again = [replace(trainer_metric(2, 1.0), measured_at=START + 90_000), trainer_metric(3, 1.0)]
    summary = summary_of([*again, *metrics], RunFacts("r"))  # in any order
    assert [batch.values["reward/mean"] for batch in batches([*again, *metrics])] == [0.0, 1.0, 1.0]
    assert (summary["optimizer_steps"], summary["trajectories_trained"]) == (3, 3 * GROUP_BATCH)


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(0, 128, 0.1), (0, 256, 0.15), (64, 192, 0.15), (192, 384, 0.8 / 3), (0, 64, 0.1), (384, 500, None), (7, 7, None)],
)
def test_mean_between_takes_part_of_a_batch(first: float, last: float, expected: float | None) -> None:
    trained = batches([trainer_metric(step, 0.1 * step) for step in (1, 2, 3)])
    assert mean_between(trained, "reward/mean", first, last) == (expected and pytest.approx(expected))


def test_summary_weights_batches_by_trajectories() -> None:
    sizes = [(1, 100.0, 1.0), (2, 1000.0, 0.0)]
    metrics = [
        Metric("trainer", step, {"trajectories": t, "reward/mean": r, "staleness/mean": r}, step)
        for step, t, r in sizes
    ]
    summary = summary_of(metrics, RunFacts("r"))
    assert summary["reward_first"] == pytest.approx(1.0)
    assert summary["reward_last"] == pytest.approx(0.0)
    assert summary["staleness_mean"] == pytest.approx(0.1)


def test_summary_before_is_first_and_after_is_final_version() -> None:
    late = [
        evaluation_metric(20, "greedy", 0.5),
        evaluation_metric(0, "sampled", 0.1),
        evaluation_metric(0, "greedy", 0.2),
    ]
    summary = summary_of(late, RunFacts("r"))
    assert (summary["heldout_before"], summary["heldout_sampled_before"]) == (0.2, 0.1)
    assert (summary["heldout_after"], summary["heldout_sampled_after"]) == (None, None)
    final = summary_of([*late, evaluation_metric(30, "greedy", 0.7, final=True)], RunFacts("r"))
    assert (final["heldout_after"], final["heldout_sampled_after"]) == (0.7, None)
    assert [each.version for each in evaluations(late)] == [0, 20]


def test_report_names_a_round_that_is_not_measured() -> None:
    gone = Metric("evaluation", 0, {"final": 0.0, "questions": 2.0, "unanswered/sampled": 398.0}, START)
    metrics = [evaluation_metric(0, "greedy", 0.2), gone, evaluation_metric(30, "sampled", 0.7, final=True)]
    summary = summary_of(metrics, RunFacts("r"))
    assert (summary["heldout_sampled_before"], summary["heldout_sampled_after"]) == (None, 0.7)
    assert summary["heldout_unmeasured"] == ["version 0 sampled (2 of 400 answers)"]
    assert "Not measured: version 0 sampled (2 of 400 answers)." in closing_lines(Path("runs/r"), summary)


@pytest.mark.parametrize(
    ("metrics", "reported", "expected"),
    [
        ([{"accuracy/greedy": 0.9}, {"accuracy/greedy": 0.2}], {}, 0.9),
        ([{"accuracy/greedy": 0.9, "best": 0.91}], {}, 0.91),
        ([], {"best": 0.8, "folder": "x", "accuracy/greedy": 0.3}, 0.8),
        ([{"progress": 0.5}], {"best": None}, None),
    ],
)
def test_summary_best_supervised_checkpoint(
    metrics: list[dict[str, float]], reported: dict[str, Any], expected: float | None
) -> None:
    series = [Metric("warm_start", index, values, index) for index, values in enumerate(metrics)]
    assert summary_of(series, RunFacts("r", warm_start=reported))["heldout_warm_start_best"] == expected


def test_newest_by_step_keeps_newest_record() -> None:
    metrics = [
        Metric("a", 2, {"x": 1.0}, 5),
        Metric("a", 1, {"x": 2.0}, 9),
        Metric("a", 2, {"x": 3.0}, 4),
        Metric("b", 1, {}, 1),
    ]
    assert [(each.step, each.values["x"]) for each in newest_by_step(metrics, "a")] == [(1, 2.0), (2, 1.0)]
    odd = [Metric("experience", 0, {"staleness/1": 3.0, "staleness/mean": 0.5, "buffer/groups": 1.0}, 1)]
    assert staleness_histogram([*odd, *odd]) == {1: 3}


def test_staleness_histogram_counts_trained_batches_only() -> None:
    packed = [Metric("experience", batch, {f"staleness/{batch}": 4.0}, 1) for batch in range(3)]
    trained = [Metric("trainer", step, {}, 1) for step in (1, 2)]
    assert staleness_histogram([*packed, *trained]) == {0: 4, 1: 4}


@pytest.mark.parametrize(
    ("trajectories", "first", "last", "expected"),
    [
        (192, 0.24, 0.42, "changed from 0.24 to 0.42 (first and last tenth of the trajectories). A tenth is 19 traj"),
        (15_400, 0.0023, 0.0, "changed from 0.0023 to 0.00 (first and last tenth of the trajectories)."),
    ],
)
def test_training_verdict_names_few_trajectories(trajectories: int, first: float, last: float, expected: str) -> None:
    text = training_verdict({"reward_first": first, "reward_last": last, "trajectories_trained": trajectories})
    assert expected in text
    assert ("may be noise" in text) == (trajectories < 1000)


def summary(
    best: float, before: float, after: float, questions: int | None = 256, careful: float = 1.0, habit: float = 0.0
) -> dict[str, Any]:
    return {
        "warm_start_careful_share": careful, "warm_start_habit_share": habit,
        "heldout_warm_start_best": best, "heldout_before": before, "heldout_after": after,
        "heldout_questions": questions, "reward_first": 0.4, "reward_last": 0.9, "audit_passed": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("figures", "expected", "unexpected"),
    [
        ((0.94, 0.24, 0.86), "0.86, below the best supervised checkpoint (0.94).", "equal"),
        ((0.94, 0.24, 0.93), "0.93, equal to the best supervised checkpoint (0.94) within the noise", "above"),
        ((0.94, 0.24, 0.95), "equal to", "above"),
        (
            (0.25, 0.21, 0.93, 256, 0.25),
            "0.93, above every measured supervised checkpoint: 0.68 above the best (0.25), 22 standard errors of the "
            "difference. The warm start's examples contained the correct method: a careful teacher wrote 25% of them "
            "(warm_start.careless_share = 0.75).",
            "habit",
        ),
        ((0.25, 0.21, 0.93), "above every measured supervised checkpoint", "careful teacher"),  # all were careful
        ((0.25, 0.21, 0.93, None, 0.25), "0.68 above the best (0.25).", "standard errors"),
        (
            (0.94, 0.24, 0.86, 256, 1.0, 0.7),
            "bad habit: answers without work in 70% of the examples, which left 0.24. Reinforcement learning from the "
            "verifier alone reduced the bad habit. The final accuracy is 0.86, below",
            "above",
        ),
        ((0.94, 0.24, 0.25, 256, 1.0, 0.7), "which left 0.24. The final accuracy is 0.25, below", "reduced"),
        ((0.60, 0.24, 0.62), "equal to", "bad habit"),  # a lower accuracy alone does not imply a bad habit
    ],
)
def test_warm_start_verdict_follows_from_numbers(figures: tuple[Any, ...], expected: str, unexpected: str) -> None:
    text = warm_start_verdict(summary(*figures))
    assert text is not None
    assert expected in text
    assert unexpected not in text


def test_verdicts_omit_unknown_values() -> None:
    assert warm_start_verdict({"heldout_before": 0.2, "heldout_after": 0.8}) is None
    assert training_verdict({}) == "No trajectory was trained."
    assert "no final evaluation" in training_verdict({"heldout_before": 0.2})
    assert "within the noise" in training_verdict(summary(0.9, 0.80, 0.82))
    assert "within the noise" not in training_verdict(summary(0.9, 0.20, 0.82))
    assert "standard error" not in training_verdict(summary(0.9, 0.2, 0.8, questions=None))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({}, "not audited"),
        ({"audit_passed": True}, "The audit passed: no trajectory lost or trained twice."),
        ({"audit_passed": False, "lost": 3, "trained_twice": 0}, "The audit FAILED: 3 lost"),
    ],
)
def test_audit_verdict_states_result(found: dict[str, Any], expected: str) -> None:
    assert expected in audit_verdict(found)


def test_closing_lines_have_results_and_next_commands() -> None:
    text = closing_lines(Path("runs/sums"), summary_of(list(history()), FACTS), Path("my sums.toml"))
    for expected in (
        "Run sums reached its goal: 80 of 80 optimizer steps, 10.2k trajectories, 144.0k tokens generated, 2:13.",
        "0.42 → 0.89",
        "0.24 → 0.86",
        "rollout-0 1×",
        "runs/sums/report.html",
        f"{laminar_command()} runs audit --run sums",
        f"{laminar_command()} run 'my sums.toml' --name sums-seed-4 --set run.seed=4",
    ):
        assert expected in text, expected
    changes = ("prompts.task=gcd", "prompts.stop=['a b']", "run.seed=3")
    again = closing_lines(Path("runs/sums"), summary_of(list(history()), FACTS), Path("my.toml"), changes)
    assert "run my.toml --name sums-seed-4 --set prompts.task=gcd" in again
    assert """ --set 'prompts.stop=['"'"'a b'"'"']' --set run.seed=4""" in again
    stopped = summary_of([], RunFacts("sums", reached=False, error="the broker went away"))
    text = closing_lines(Path("runs/sums"), stopped, Path("my.toml"))
    assert "ended before its goal" in text
    assert "Error: the broker went away" in text


def by_task(metric: Metric) -> Metric:
    """Add the values of two tasks, of which the larger has twice the accuracy."""
    values = dict(metric.values)
    for task, count, accuracy in (("few", 32.0, 0.3), ("many", 96.0, 0.6)):
        if metric.name == "experience":
            reward = accuracy + 0.3 * (metric.step >= STEPS / 2)
            values |= {
                labelled("trajectories", task=task): count,
                labelled("reward/mean", task=task): reward,
                labelled("response_length/mean", task=task): 9.0,
            }
        elif metric.name == "evaluation" and "accuracy/greedy" in values:
            values[labelled("accuracy/greedy", task=task)] = accuracy / 2 if metric.step else 0.0
    return replace(metric, values=values)


def test_summary_has_metrics_of_each_task() -> None:
    metrics = [by_task(metric) for metric in history()]
    summary = summary_of(metrics, FACTS)
    assert list(summary["tasks"]) == ["many", "few"]
    ordered = summary_of(metrics, replace(FACTS, tasks=("few", "none")))["tasks"]
    assert list(ordered) == ["few", "many"]  # as in the configuration
    assert summary["tasks"]["few"] == {
        "reward_first": pytest.approx(0.3),
        "reward_last": pytest.approx(0.6),
        "heldout_before": 0.0,
        "heldout_after": 0.15,
        "trajectories_trained": 32 * STEPS,
        "heldout_sampled_before": None,
        "heldout_sampled_after": None,
        "response_length_first": pytest.approx(9.0),
        "response_length_last": pytest.approx(9.0),
    }
    text = closing_lines(Path("runs/sums"), summary, Path("my.toml"))
    assert re.search(r"many.*\n +mean reward +0\.60 → 0\.90\n +accuracy, greedy +0\.00 → 0\.30\n", text)
    assert {"Mean reward by task", "Held-out accuracy by task, greedy"} <= {c.title for c in charts(metrics, summary)}
    assert summary_of(list(history()), FACTS)["tasks"] is None


def test_summary_has_the_mean_of_each_of_several_rewards() -> None:
    def with_components(metric: Metric, names: Sequence[str]) -> Metric:
        if metric.name != "experience":
            return metric
        mean = {"exact": 0.2, "brief": 0.5 + 0.4 * (metric.step >= STEPS / 2)}
        means = {labelled("component/mean", component=name): mean[name] for name in names}
        counts = {labelled("component/trajectories", component=name): 128.0 for name in names}
        return replace(metric, values={**metric.values, **means, **counts})

    metrics = [with_components(metric, ("exact", "brief")) for metric in history()]
    summary = summary_of(metrics, FACTS)
    assert {name: [round(each, 6) for each in found.values()] for name, found in summary["components"].items()} == {
        "exact": [0.2, 0.2],
        "brief": [0.5, 0.9],
    }
    text = closing_lines(Path("runs/sums"), summary, Path("my.toml"))
    assert re.search(r"component brief +0\.50 → 0\.90\n", text)
    assert "Reward by component, before weighting" in {chart.title for chart in charts(metrics, summary)}
    assert summary_of([with_components(metric, ("exact",)) for metric in history()], FACTS)["components"] is None


def test_summarise_reads_run_folder(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.append(history())
    roles = {"rollout-0": {"pid": 3, "restarts": 2, "alive": False}}
    state = {"run": "sums", "started_at": 100.0, "ended_at": 160.5, "error": None, "roles": roles}
    (tmp_path / "state.json").write_text(json.dumps({**state, "goal": {"optimizer_steps": 90}}))
    (tmp_path / "config.toml").write_text(
        "[run]\nname = 'sums'\nseed = 7\n[warm_start]\ncareless_share = 0.75\nslip_rate = 1.0\nhabit_steps = 9\n"
    )
    (tmp_path / "warm_start.json").write_text('{"best": 0.97, "folder": "x"}')
    found = summarise(tmp_path, {"lost": 0, "trained_twice": 0, "passed": True}, {"training": 50.0})
    expected = {
        "run": "sums", "reached": True, "seed": 7, "wall_seconds": 60.5, "restarts": {"rollout-0": 2}, "lost": 0,
        "heldout_warm_start_best": 0.97, "optimizer_steps": STEPS, "optimizer_steps_goal": 90, "weight_versions": 81,
        "phases": {"training": 50.0}, "warm_start_careful_share": 0.25, "warm_start_habit_share": 0.7,
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    json.dumps(found, allow_nan=False)


def test_summarise_of_empty_folder(tmp_path: Path) -> None:
    found = summarise(tmp_path, None, {})
    assert (found["run"], found["reached"], found["lost"], found["wall_seconds"]) == (tmp_path.name, None, None, None)


def test_describe_machine() -> None:
    assert describe_machine()["cores"] >= 1
    assert package_versions()["apache-beam"].startswith("2.")
    assert cpu_model("processor\t: 0\nmodel name\t: Some CPU @ 3: fast\nmodel name\t: Other\n") == "Some CPU @ 3: fast"
    assert cpu_model("processor : 0\nFeatures : fp\n") is None
