"""summary.json: the metrics of a run. `summary_of` is pure, `summarise` reads a run's folder. Unknown values: null."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from operators.trainer.warm_start_config import WarmStartConfig
from pipelines.inspect.metrics_file import UNREADABLE, read_metrics
from pipelines.inspect.run_files import METRICS_FILE, STATE_FILE, SUBMITTED, SUMMARY_FILE
from pipelines.inspect.run_folders import config_file, newest_audit, read_run
from pipelines.inspect.run_state.agents import agents_of
from pipelines.inspect.run_state.buffers import curriculum_levels, merge_shards
from pipelines.inspect.run_state.busy import busy_shares_of
from pipelines.inspect.run_state.episodes import episodes_of
from pipelines.inspect.run_state.errors import error_counts, errors_by_task, refused_rows
from pipelines.inspect.run_state.evaluation import Evaluation, unmeasured_rounds
from pipelines.inspect.run_state.learning import WARN_STEPS, dropped_warning, learning_signs, learning_summary
from pipelines.inspect.run_times import downtime_s
from pipelines.present.report.machine import describe_machine, package_versions
from pipelines.present.report.series import (
    Batch,
    batches,
    components_of,
    dropped_by_length,
    evaluations,
    mean_between,
    newest_by_step,
    over_age,
    staleness_histogram,
    task_batches,
    tokens_generated,
    tokens_per_s,
    weight_versions,
    weighted_mean,
)
from pipelines.present.report.verdict import is_failing
from pipelines.run_config import RunConfig
from schemas.metric_labels import COMPONENT_MEAN, SHARD
from schemas.records import Metric

TENTH = 0.1


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts of a run that are not in its metrics.

    `phases`: seconds by name, in order. `audit`: the result of `Audit.to_json()`. `restarts`: by role. `warm_start`:
    values of the series of that name that are not in the metrics; `teaching`: its section of the configuration.
    `reached`: whether it ended without an error, so at its goal; False of submitted roles, which may end before.
    `wall_seconds` are those in which it ran, without `downtime_seconds`, those between its ends and its resumptions.
    """

    run: str
    reached: bool | None = None
    error: str | None = None
    seed: int | None = None
    started_at: float | None = None
    wall_seconds: float | None = None
    downtime_seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    audit: Mapping[str, Any] | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)
    warm_start: Mapping[str, Any] = field(default_factory=dict)
    teaching: Mapping[str, Any] | None = None
    goal: int | None = None
    tasks: Sequence[str] = ()
    """In the order of the configuration."""
    stop_error_share: float | None = None
    failures_rewarded: bool = False
    warn_steps: int = WARN_STEPS
    machine: Mapping[str, Any] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)


def summarise(folder: Path, audit: Mapping[str, Any] | None, phases: Mapping[str, float]) -> dict[str, Any]:
    """Return the summary of the run in `folder` from its files, its audit, and the seconds of each phase.

    Raises OSError or ValueError if metrics.jsonl, state.json or config.toml cannot be read.
    """
    metrics = read_metrics(folder / METRICS_FILE)
    return summary_of(metrics, facts_of(folder, audit, phases))


def read_summary(folder: Path, metrics: Sequence[Metric]) -> dict[str, Any]:
    """Return the summary.json of the run in `folder`; of a run that has not ended, made now of its `metrics`.

    Raises as `summarise`.
    """
    file = folder / SUMMARY_FILE
    return _json(file) if file.exists() else summary_of(metrics, facts_of(folder, newest_audit(folder), {}))


def facts_of(folder: Path, audit: Mapping[str, Any] | None, phases: Mapping[str, float]) -> RunFacts:
    """Read the facts of a run from the files in its folder, without the metrics."""
    supervised = (folder / STATE_FILE).exists() or not (folder / SUBMITTED).is_dir()
    state = _json(folder / STATE_FILE) if supervised else read_run(folder).state
    file = config_file(folder)
    config = {} if file is None else tomllib.loads(file.read_text("utf-8"))
    score = config.get("score", {})
    started, ended = state.get("started_at"), state.get("ended_at")
    down = downtime_s(state.get("phases"))
    return RunFacts(
        run=state.get("run") or folder.name,
        reached=None if ended is None else supervised and state.get("error") is None,
        error=state.get("error"),
        seed=config.get("run", {}).get("seed"),
        started_at=started,
        wall_seconds=ended - started - down if started is not None and ended is not None else None,
        downtime_seconds=down,
        phases=phases,
        audit=audit,
        restarts={name: role.get("restarts", 0) for name, role in state.get("roles", {}).items()},
        warm_start=_json(folder / "warm_start.json"),
        teaching=config.get("warm_start"),
        tasks=[str(each.get("name", "")) for each in config.get("prompts", {}).get("tasks", ())],
        goal=state.get("goal", config.get("trainer", {})).get("optimizer_steps"),
        stop_error_share=config.get("run", {}).get("stop_error_share", RunConfig.stop_error_share),
        failures_rewarded=any("on_error" in each for each in (score, *score.get("tasks", ()))),
        warn_steps=config.get("run", {}).get("warn_steps", WARN_STEPS),
        machine=describe_machine(),
        packages=package_versions(),
    )


def summary_of(metrics: Sequence[Metric], facts: RunFacts) -> dict[str, Any]:
    """Return the summary, JSON-ready.

    reward_first and reward_last are means over the first and the last tenth of the trained trajectories;
    reward_constant is the reward of all of them, if it was the same. heldout_before is the accuracy of the first
    evaluated version, heldout_after of the final one (greedy; `_sampled_`: sampled as in training), heldout_reward_*
    the mean reward of the greedy answers. heldout_unmeasured names the rounds that had too few answers for an accuracy.
    heldout_warm_start_best is the greedy accuracy of the best supervised checkpoint of the warm start.
    warm_start_careful_share and warm_start_habit_share are the shares of its examples from a careful teacher and of
    those that teach a bad habit. `tasks` has the metrics by task, `components` the means of each reward function, if
    there are several.
    """
    trained = batches(metrics)
    held_out = evaluations(metrics)
    before = held_out[0] if held_out else None
    after = next((each for each in reversed(held_out) if each.final), None)
    steps = newest_by_step(metrics, "trainer")
    stalest = [metric.values["staleness/max"] for metric in steps if "staleness/max" in metric.values]
    audit = facts.audit or {}
    score = newest_score(metrics)
    errors = error_counts(score) if score else None
    scored = errors_by_task(score)
    signs = learning_signs((metric.values for metric in steps), facts.warn_steps)
    buffer = newest_by_step(metrics, "experience")[-1:]
    dropped = dropped_warning(buffer[0].values if buffer else {}, facts.warn_steps)
    at_goal = facts.goal is not None and bool(steps) and steps[-1].step >= facts.goal
    summary = {
        "run": facts.run,
        "reached": (at_goal or facts.reached) if facts.error is None else facts.reached,
        "error": facts.error,
        **first_and_last("reward", trained, "reward/mean"),
        "reward_constant": constant_reward(steps),
        "heldout_first_version": before and before.version,
        "heldout_before": before and before.greedy,
        "heldout_after": after and after.greedy,
        "heldout_sampled_before": before and before.sampled,
        "heldout_sampled_after": after and after.sampled,
        "heldout_reward_before": before and before.greedy_reward,
        "heldout_reward_after": after and after.greedy_reward,
        "heldout_unmeasured": [text for each in held_out for text in unmeasured_rounds(each)] or None,
        "heldout_warm_start_best": best_warm_start(metrics, facts.warm_start),
        "warm_start_careful_share": careful_share(facts.teaching),
        "warm_start_habit_share": habit_share(facts.teaching),
        "heldout_questions": next((each.questions for each in (after, before) if each), None),
        "trajectories_trained": int(trained[-1].cumulative) if trained else None,
        "trajectories_scored": errors and errors.trajectories,
        "reward_errors": errors and errors.reward_errors,
        "episode_errors": errors and errors.episode_errors,
        "generation_errors": errors and errors.generation_errors,
        "error_share": errors and errors.share,
        "errors_by_task": {task: each._asdict() for task, each in scored.items()} or None,
        "refused_rows": refused_of(metrics),
        "agents": agents_of(metrics),
        "episodes": episodes_of(score),
        "warnings": [*learning_summary(signs), *dropped.values()] or None,
        "stop_error_share": facts.stop_error_share,
        "failures_rewarded": facts.failures_rewarded or None,
        "tasks": by_task(metrics, before, after, scored, facts.tasks),
        "components": by_component(metrics),
        "curriculum_levels": levels_by_curriculum(metrics),
        "optimizer_steps": steps[-1].step if steps else None,
        "optimizer_steps_goal": facts.goal,
        "weight_versions": weight_versions(metrics),
        "staleness_mean": weighted_mean(trained, "staleness/mean"),
        "staleness_max": int(max(stalest)) if stalest else None,
        "over_age": over_age(metrics),
        "staleness_histogram": {str(age): count for age, count in staleness_histogram(metrics).items()},
        "staleness_at_finish_histogram": {
            str(age): count for age, count in staleness_histogram(metrics, "staleness_at_finish").items()
        },
        "dropped_share_by_length_decile": dropped_by_length(metrics) or None,
        **first_and_last("response_length", trained, "response_length/mean"),
        **first_and_last("kl_reference", trained, "kl/ref"),
        "kl_mismatch": weighted_mean(trained, "kl/mismatch"),
        "busy": busy_shares_of(metrics),
        "tokens_generated": tokens_generated(metrics),
        "tokens_per_s": tokens_per_s(metrics),
        "started_at": facts.started_at,
        "wall_seconds": facts.wall_seconds,
        "downtime_seconds": facts.downtime_seconds or None,
        "phases": dict(facts.phases),
        "lost": audit.get("lost"),
        "trained_twice": audit.get("trained_twice"),
        "audit_passed": audit.get("passed"),
        "unreadable_records": unreadable_records(metrics),
        "seed": facts.seed,
        "restarts": dict(facts.restarts),
        "machine": dict(facts.machine),
        "packages": dict(facts.packages),
    }
    return {**summary, "reached": summary["reached"] and not is_failing(summary)}


def constant_reward(steps: Sequence[Metric]) -> float | None:
    """Return the reward of all trajectories of the updates `steps`, if it was the same; else None."""
    means = {metric.values.get("reward/mean") for metric in steps}
    same = len(means) == 1 and all(
        metric.values.get("reward/std") == 0 and metric.values.get("frac_reward_zero_std", 1.0) == 1 for metric in steps
    )  # the rewards of an agent's conversations may differ where those of trajectories do not
    return means.pop() if same else None


def by_task(
    metrics: Sequence[Metric],
    before: Evaluation | None,
    after: Evaluation | None,
    scored: Iterable[str],
    ordered: Sequence[str] = (),
) -> dict[str, Any] | None:
    """Return the metrics of each task, with the keys of the summary; None if there is only one task.

    `scored` names the tasks with scored trajectories: none of a task may be trained, if all have an error. Those in
    `ordered` come first.
    """
    tasks: dict[str, Any] = {}
    batches_of = task_batches(metrics)
    known = dict.fromkeys([*batches_of, *scored])
    for task in dict.fromkeys([*(each for each in ordered if each in known), *known]):
        trained = batches_of.get(task, [])
        tasks[task] = {
            **first_and_last("reward", trained, "reward/mean"),
            "heldout_before": before and before.by_task.get(task),
            "heldout_after": after and after.by_task.get(task),
            "heldout_sampled_before": before and before.sampled_by_task.get(task),
            "heldout_sampled_after": after and after.sampled_by_task.get(task),
            "trajectories_trained": int(trained[-1].cumulative) if trained else 0,
            **first_and_last("response_length", trained, "response_length/mean"),
        }
    return tasks if len(tasks) > 1 else None


def by_component(metrics: Sequence[Metric]) -> dict[str, Any] | None:
    """Return the first and last mean of each reward component, before weighting; None if there is only one."""
    components = components_of(metrics).items()
    return {name: first_and_last("mean", trained, COMPONENT_MEAN) for name, trained in components} or None


def levels_by_curriculum(metrics: Sequence[Metric]) -> dict[str, list[int]] | None:
    """Return the levels of each curriculum in the order in which they began, by task; None without a curriculum."""
    found: dict[str, list[int]] = {}
    for metric in newest_by_step(metrics, "experience"):
        for task, level in curriculum_levels(metric.values).items():
            levels = found.setdefault(task, [])
            if levels[-1:] != [level]:
                levels.append(level)
    return found or None


def first_and_last(name: str, trained: Sequence[Batch], key: str) -> dict[str, float | None]:
    """Return the means of `key` over the first and the last tenth of the trained trajectories."""
    total = trained[-1].cumulative if trained else 0.0
    first, last = mean_between(trained, key, 0, TENTH * total), mean_between(trained, key, (1 - TENTH) * total, total)
    return {f"{name}_first": first, f"{name}_last": last}


def refused_of(metrics: Sequence[Metric]) -> dict[str, int]:
    """Return the refused rows by kind, of the newest metric of prompts."""
    found = [metric for metric in metrics if metric.name == "prompts"]
    return refused_rows(max(found, key=lambda metric: metric.step).values) if found else {}


def newest_score(metrics: Sequence[Metric]) -> Mapping[str, float]:
    """Return the values of the newest metrics of all shards of score; empty without one."""
    found = sorted((metric for metric in metrics if metric.name == "score"), key=lambda metric: metric.step)
    newest = {metric.values.get(SHARD, 0.0): metric.values for metric in found}
    return merge_shards(list(newest.values())) if newest else {}


def careful_share(teaching: Mapping[str, Any] | None) -> float | None:
    """Return the share of worked answers from a teacher without errors; None without a warm start."""
    if teaching is None:
        return None
    slips = teaching.get("slip_rate", WarmStartConfig.slip_rate)
    return 1.0 - teaching.get("careless_share", WarmStartConfig.careless_share) if slips else 1.0


def habit_share(teaching: Mapping[str, Any] | None) -> float | None:
    """Return the share of answers without work in the bad-habit phase (0 without it); None without a warm start."""
    if teaching is None:
        return None
    if not teaching.get("habit_steps", WarmStartConfig.habit_steps):
        return 0.0
    share: float = teaching.get("habit_share", WarmStartConfig.habit_share)
    return share


def unreadable_records(metrics: Sequence[Metric]) -> dict[str, int]:
    """Return the number of unreadable records that an observer found, by topic."""
    found = Counter[str]()
    for metric in metrics:
        if metric.name == UNREADABLE:
            found.update({short_name: int(records) for short_name, records in metric.values.items()})
    return dict(found)


def _json(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return found


def best_warm_start(metrics: Sequence[Metric], reported: Mapping[str, Any]) -> float | None:
    """Return the best greedy accuracy of a supervised checkpoint: as the warm start reports it, else the maximum."""
    values = [*(metric.values for metric in metrics if metric.name == "warm_start"), reported]
    for key in ("best", "accuracy/greedy"):
        known = [each[key] for each in values if isinstance(each.get(key), int | float)]
        if known:
            return float(max(known))
    return None
