"""The last lines of `laminar run`: what was reached, and what to try next."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.present.report.verdict import audit_verdict, training_verdict, warm_start_verdict
from pipelines.present.view.text import UNKNOWN, clock, count, figure


def closing_lines(folder: Path, summary: Mapping[str, Any], file: Path | None = None) -> str:
    """Plain text of some lines; `folder` is the run's and `file` its configuration, as the user would write them.

    Without `file` there is none that another run could be made of.
    """
    run = summary["run"]
    steps, goal = summary.get("optimizer_steps"), summary.get("optimizer_steps_goal")
    reached = "reached its goal" if summary.get("reached") else "ended before its goal"
    what = [
        f"{steps or 0}{f' of {goal}' if goal else ''} optimizer steps",
        f"{count(summary.get('trajectories_trained') or 0)} trajectories",
        f"{count(summary.get('tokens_generated'))} tokens generated",
        clock(summary.get("wall_seconds")),
    ]
    lines = ["", f"Run {run} {reached}: {', '.join(what)}."]
    if summary.get("error"):
        lines.append(f"  Error: {summary['error']}")
    lines += ["", *(f"  {label:<22}{before:>7} → {after}" for label, before, after in _rises(summary))]
    for task, figures in (summary.get("tasks") or {}).items():
        lines.append(f"  {task[:20]}")
        lines += [f"  {f'  {label}':<22}{before:>7} → {after}" for label, before, after in _rises(figures)]
    best = summary.get("heldout_warm_start_best")
    if best is not None:
        lines.append(
            f"  {'best supervised':<22}{figure(best):>7}   held-out, greedy: the best checkpoint of the warm start"
        )
    mean, most = summary.get("staleness_mean"), summary.get("staleness_max")
    over = summary.get("over_age")
    told_over = f", {over} trajectories over age (experience.max_staleness)" if over else ""
    lines.append(f"  {'staleness':<22}{figure(mean):>7}   mean, at most {figure(most, 0)} versions{told_over}")
    restarts = {name: number for name, number in (summary.get("restarts") or {}).items() if number}
    if restarts:
        lines.append(f"  {'restarts':<22}{sum(restarts.values()):>7}   {', '.join(map(_times, restarts.items()))}")
    told = warm_start_verdict(summary)
    lines += ["", training_verdict(summary), *([told] if told else []), audit_verdict(summary)]
    commands = next_commands(run, folder)
    if file is not None:
        again = f"{laminar_command()} run {file} --set run.seed={(summary.get('seed') or 0) + 1}"
        commands.append((again, "the same with another seed"))
    width = max(len(command) for command, _ in commands)
    return "\n".join([*lines, "", "Next:", *(f"  {command:<{width}}  {about}" for command, about in commands), ""])


def next_commands(run: str, folder: Path) -> list[tuple[str, str]]:
    """Commands that work as they stand, each with what it is for."""
    return [
        (f"{folder}/report.html", "the run in plots: open it in a browser"),
        (f"{laminar_command()} runs audit --run {run}", "prove again that nothing was lost or trained twice"),
        (f"{laminar_command()} topics tail trajectories --run {run}", "read what the model wrote"),
        (f"{laminar_command()} weights list --run {run}", "the weight versions that were published"),
    ]


def laminar_command() -> str:
    """The command as it must be written here: by its path where the shell would not find it."""
    if shutil.which("laminar"):
        return "laminar"
    here, command = Path.cwd(), Path(sys.executable).with_name("laminar")
    return str(command.relative_to(here) if command.is_relative_to(here) else command)


def _rises(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    rows = (
        ("reward", "reward_first", "reward_last"),
        ("held-out, greedy", "heldout_before", "heldout_after"),
        ("held-out, sampled", "heldout_sampled_before", "heldout_sampled_after"),
        ("response length", "response_length_first", "response_length_last"),
    )
    shown = [(label, figure(summary.get(first)), figure(summary.get(last))) for label, first, last in rows]
    return [row for row in shown if row[1:] != (UNKNOWN, UNKNOWN)]


def _times(item: tuple[str, int]) -> str:
    name, number = item
    return f"{name} {number}×"
