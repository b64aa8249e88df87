"""The final message of `laminar run`: the results, and the next commands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.inspect.run_files import REPORT_FILE
from pipelines.inspect.run_folders import laminar_command, run_command
from pipelines.inspect.run_state.buffers import levels_text
from pipelines.inspect.run_state.busy import busy_text
from pipelines.inspect.run_state.episodes import endings_text
from pipelines.present.report.verdict import outcome, verdicts
from pipelines.present.view.text import UNKNOWN, count, figure, with_downtime
from pipelines.roles import described


def closing_lines(
    folder: Path, summary: Mapping[str, Any], file: Path | None = None, changes: Sequence[str] = ()
) -> str:
    """Return the message as plain text. `folder` is the run's and `file` its configuration, as the user writes them.

    `changes` are the options `--set` of the run. Without `file` the message does not suggest another run.
    """
    run = summary["run"]
    steps, goal = summary.get("optimizer_steps"), summary.get("optimizer_steps_goal")
    totals = [
        f"{steps or 0}{f' of {goal}' if goal else ''} optimizer steps",
        f"{count(summary.get('trajectories_trained') or 0)} trajectories",
        f"{count(summary.get('tokens_generated'))} tokens generated",
        with_downtime(summary.get("wall_seconds"), summary.get("downtime_seconds")),
    ]
    lines = ["", f"Run {run} {outcome(summary)}: {', '.join(totals)}."]
    if summary.get("error"):
        lines.append(f"  Error: {summary['error']}")
    lines += ["", *(f"  {label:<22}{before:>7} → {after}" for label, before, after in _changes(summary))]
    for name, of_name in (summary.get("components") or {}).items():
        first, last = figure(of_name["mean_first"]), figure(of_name["mean_last"])
        lines.append(f"  {f'component {name}':<22} {first:>6} → {last}")
    if levels := summary.get("curriculum_levels"):
        passed = {
            task: " → ".join(map(str, [each[0], each[-1]] if len(each) > 1 else each)) for task, each in levels.items()
        }
        several = any(len(each) > 1 for each in levels.values())
        about = "; rewards of several levels are not comparable" if several else ""
        lines.append(f"  {'curriculum level':<22}{'':>7}   {levels_text(passed)} (from 0){about}")
    for number, (task, figures) in enumerate((summary.get("tasks") or {}).items()):
        tenths = "" if number else ": first and last tenth of the trajectories of this task alone"
        lines.append(f"  {task[:20]}{tenths}")
        lines += [f"  {f'  {label}':<22}{before:>7} → {after}" for label, before, after in _changes(figures)]
        if not figures.get("trajectories_trained"):
            lines.append(f"  {'  trained':<22}{0:>7}   no trajectory of this task")
    best = summary.get("heldout_warm_start_best")
    if best is not None:
        lines.append(
            f"  {'best supervised':<22}{figure(best):>7}   held-out, greedy: best checkpoint of the warm start"
        )
    mean, most = summary.get("staleness_mean"), summary.get("staleness_max")
    over_limit = summary.get("over_age")
    over_text = f", {over_limit} trajectories above experience.max_staleness" if over_limit else ""
    range_text = f"mean of the run, maximum {figure(most, 0)} version{'s' * (most != 1)}"
    lines.append(f"  {'staleness':<22}{figure(mean):>7}   {range_text}{over_text}")
    if episodes := summary.get("episodes"):
        of = f"mean of {episodes['episodes']} episodes; ended: {endings_text(episodes['endings'])}"
        lines.append(f"  {'turns':<22}{figure(episodes['turns_mean']):>7}   {of}")
    restarts = {name: number for name, number in (summary.get("restarts") or {}).items() if number}
    if restarts:
        lines.append(f"  {'restarts':<22}{sum(restarts.values()):>7}   {', '.join(map(_times, restarts.items()))}")
    if busy := busy_text(summary.get("busy") or {}):
        lines.append(f"  {'busy':<22}{'':>7}   {busy}")
    lines += ["", *verdicts(summary, folder), "", f"Report: {folder / REPORT_FILE} (open it in a browser)"]
    commands = next_commands(folder)
    if file is not None:
        kept = [each for each in changes if each.partition("=")[0].strip() not in ("run.seed", "run.name")]
        seed = (summary.get("seed") or 0) + 1
        again = " ".join(f"--set {shlex.quote(each)}" for each in [*kept, f"run.seed={seed}"])
        # With a name: that of the configuration file is taken by this run.
        name = shlex.quote(f"{folder.name}-seed-{seed}")
        command = f"{laminar_command()} run {shlex.quote(str(file))} --name {name} {again}"
        commands.append((command, "repeat the run with another seed"))
    listed = (f"  # {about}\n  {command}" for command, about in commands)
    return "\n".join([*lines, "", "Next:", *listed, ""])


def next_commands(folder: Path) -> list[tuple[str, str]]:
    """Return commands that work unchanged in the working directory, each with its purpose."""
    return [
        (run_command(folder, "samples"), "read what the model answers; --best, --worst, --diff"),
        (run_command(folder, "runs audit"), "verify again that no trajectory was lost or trained twice"),
        (run_command(folder, "weights list"), "list the published weight versions"),
    ]


def _changes(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    rows = (
        ("mean reward", "reward_first", "reward_last"),
        ("accuracy, greedy", "heldout_before", "heldout_after"),
        ("accuracy, sampled", "heldout_sampled_before", "heldout_sampled_after"),
        ("held-out reward", "heldout_reward_before", "heldout_reward_after"),
        ("response length", "response_length_first", "response_length_last"),
    )
    shown = [(label, figure(summary.get(first)), figure(summary.get(last))) for label, first, last in rows]
    return [row for row in shown if row[1:] != (UNKNOWN, UNKNOWN)]


def _times(item: tuple[str, int]) -> str:
    name, number = item
    return f"{described(name)} {number}×"
