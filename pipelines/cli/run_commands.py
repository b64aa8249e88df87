"""`laminar runs logs`, `resume`, `drain` and `compare`: what a run says, and going on with it, or to its end."""

from __future__ import annotations

import json as jsons
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelines.cli.options import RUNS, JsonOption, RunOption
from pipelines.present.output import Report, RowOutput, table

FolderOption = Annotated[Path, typer.Option("--folder", metavar="DIR", help="Where the runs are.")]
COMPARED = (
    "run",
    "reached",
    "optimizer_steps",
    "trajectories_trained",
    "reward_first",
    "reward_last",
    "heldout_before",
    "heldout_after",
    "staleness_mean",
    "staleness_max",
    "tokens_generated",
    "tokens_per_s",
    "wall_seconds",
    "seed",
    "lost",
    "trained_twice",
)
"""What runs are compared by: names of summary.json, and tokens generated a second of the whole run."""
LOOK_S = 0.5


def logs_command(
    role: Annotated[str, typer.Argument(metavar="[ROLE]", help="One role (score, rollout-0); by default all.")] = "",
    count: Annotated[int, typer.Option("-n", min=0, help="The last so many lines of each.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    run: RunOption = None,
    folder: FolderOption = RUNS,
    json: JsonOption = False,
) -> RowOutput:
    """Print what the processes of a run have said: the end of their logs.

    \b
    Examples:
      laminar runs logs
      laminar runs logs trainer -n 100 --run first
      laminar runs logs score -f
    """
    from pipelines.inspect.run_folders import find_run

    logs = find_run(folder, run).folder / "logs"
    files = {file.stem: file for file in sorted(logs.glob("*.log"))}
    if role and role not in files:
        raise typer.BadParameter(f"{logs} has no log of {role!r}; there are {', '.join(files) or 'none'}")
    chosen = {role: files[role]} if role else files
    parts = ([line] for line in _said(chosen, count, follow))
    return RowOutput(parts, None, "jsonl" if json else "lines", line=lambda row: f"{row['role']:<12} {row['line']}")


def _said(files: dict[str, Path], count: int, follow: bool) -> Iterator[dict[str, str]]:
    ends = {}
    for role, file in files.items():
        data = file.read_bytes()
        ends[role] = len(data)
        lines = data.decode(errors="replace").splitlines()
        yield from ({"role": role, "line": line} for line in lines[max(0, len(lines) - count) :])
    while follow:
        time.sleep(LOOK_S)
        for role, file in files.items():
            with file.open("rb") as log:
                log.seek(ends[role])
                data = log.read()
            whole = data[: data.rfind(b"\n") + 1]
            ends[role] += len(whole)
            yield from ({"role": role, "line": line} for line in whole.decode(errors="replace").splitlines())


def resume_command(
    context: typer.Context,
    run: RunOption = None,
    folder: FolderOption = RUNS,
    json: JsonOption = False,
) -> Report:
    """Go on with a run that was stopped, killed, or lost its machine: from its log and its newest checkpoint.

    What was submitted with --detach is kept again, and this returns; what `laminar run` had started goes on here, to
    its goal, its own broker included.

    \b
    Examples:
      laminar runs resume
      laminar runs resume --run first
    """
    from pipelines.inspect.run_folders import find_run_to_resume
    from pipelines.inspect.submissions import submissions
    from pipelines.run.submission.detached import start_respawner

    found = find_run_to_resume(folder, run)
    if found.reached:
        told = {"run": found.run, "resumed": {}}
        return Report(told, lambda: f"run {found.run} has reached its goal: nothing is left to do", as_json=json)
    kept = [start_respawner(each) for each in submissions(found.folder) if each.respawner() is None]
    if found.supervised and found.status != "running":
        from pipelines.run.local import resume_locally
        from pipelines.run.stop_requests import StopRequests

        return resume_locally(found, context.with_resource(StopRequests(final=bool(context.obj))), as_json=json)
    data = {"run": found.run, "resumed": {each.role.name: each.pid for each in kept}}
    names = ", ".join(each.role.name for each in kept)
    text = f"run {found.run} goes on: {names}" if kept else f"all of run {found.run} is up"
    return Report(data, lambda: text, as_json=json)


def drain_command(
    run: RunOption = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="How long it may take.")] = 600.0,
    folder: FolderOption = RUNS,
    json: JsonOption = False,
) -> Report:
    """End what was submitted with --detach without leaving anything half done: no new prompts, then, once all that was
    asked is answered and scored, every pipeline in its turn. Exits with 1 if it took too long.

    \b
    Examples:
      laminar runs drain --run first --timeout 3600
    """
    from pipelines.config import load_config
    from pipelines.inspect.run_folders import find_run
    from pipelines.inspect.submissions import submissions
    from pipelines.run.drain import drain

    found = find_run(folder, run)
    kept = [each for each in submissions(found.folder) if each.respawner() is not None]
    if not kept:
        raise typer.BadParameter(f"nothing that was submitted with --detach is up in run {found.run}")
    left = drain(kept, load_config(kept[0].config), time.monotonic() + timeout, lambda line: typer.echo(line, err=True))
    data = {"run": found.run, "drained": not left, "up": left}
    text = f"run {found.run} has drained" if not left else f"still up after {timeout:g} s: {', '.join(left)}"
    return Report(data, lambda: text, as_json=json, exit_code=1 if left else 0)


def compare_command(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Two runs or more, by name.")],
    folder: FolderOption = RUNS,
    json: JsonOption = False,
) -> Report:
    """Put runs side by side: reward, accuracy, staleness, speed, books.

    \b
    Examples:
      laminar runs compare first second
      laminar runs compare first second third --json
    """
    columns = [_summary(folder / name) for name in runs]
    rows = [
        {"figure": figure, **{name: _shown(column.get(figure)) for name, column in zip(runs, columns, strict=True)}}
        for figure in COMPARED
    ]
    data = [{figure: column.get(figure) for figure in COMPARED} for column in columns]
    return Report(data, lambda: table(rows, ["figure", *runs]), as_json=json)


def _summary(folder: Path) -> dict[str, Any]:
    """summary.json of a run, made now where it has not ended."""
    file = folder / "summary.json"
    if file.exists():
        said: dict[str, Any] = jsons.loads(file.read_text(encoding="utf-8"))
    else:
        from pipelines.inspect.run_folders import read_run
        from pipelines.present.report.summary import summarise

        said = summarise(read_run(folder).folder, None, {})
    tokens, seconds = said.get("tokens_generated"), said.get("wall_seconds")
    return {**said, "tokens_per_s": round(tokens / seconds, 1) if tokens and seconds else None}


def _shown(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value
