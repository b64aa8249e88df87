"""`laminar runs logs`: print the logs of a run's processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.options import FollowOption, Printing, RunOption, RunsFolder
from pipelines.inspect.run_files import LOGS
from pipelines.inspect.run_folders import RUNS
from pipelines.present.output import RowOutput

POLL_S = 0.5


def logs_command(
    printing: Printing,
    role: Annotated[str, typer.Argument(metavar="[ROLE]", help="One role (score, rollout-0); by default all.")] = "",
    count: Annotated[int, typer.Option("-n", min=0, help="How many of the last lines of each role.")] = 20,
    follow: FollowOption = False,
    run: RunOption = None,
    folder: RunsFolder = RUNS,
) -> RowOutput:
    """Print the last lines of the logs of a run's processes.

    \b
    Examples:
      laminar runs logs
      laminar runs logs trainer -n 100 --run first
      laminar runs logs score -f
    """
    from pipelines.inspect.run_folders import find_run
    from pipelines.roles import LIGHT, shares_process

    logs = find_run(folder, run).folder / LOGS
    files = {file.stem: file for file in sorted(logs.glob("*.log"))}
    if role not in files and LIGHT in files and shares_process(role):
        role = LIGHT  # the compact layout: one process, and one log, for these roles
    if role and role not in files:
        raise typer.BadParameter(f"{logs} has no log of {role!r}; there are {', '.join(files) or 'none'}")
    chosen = {role: files[role]} if role else files
    parts = ([line] for line in _log_lines(chosen, count, follow))
    none = f"the logs in {logs} have no lines" if files else f"there are no logs in {logs}"
    form = printing.form("lines", follow=follow)
    return RowOutput(parts, None, form, none, line=lambda row: f"{row['role']:<12} {row['line']}")


def _log_lines(files: dict[str, Path], count: int, follow: bool) -> Iterator[dict[str, str]]:
    ends = {}
    for role, file in files.items():
        data = file.read_bytes()
        ends[role] = len(data)
        lines = data.decode(errors="replace").splitlines()
        yield from ({"role": role, "line": line} for line in lines[max(0, len(lines) - count) :])
    while follow:
        time.sleep(POLL_S)
        for role, file in files.items():
            with file.open("rb") as log:
                log.seek(ends[role])
                data = log.read()
            whole = data[: data.rfind(b"\n") + 1]
            ends[role] += len(whole)
            yield from ({"role": role, "line": line} for line in whole.decode(errors="replace").splitlines())
