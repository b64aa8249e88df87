"""`laminar runs compare`: compare runs side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import JsonOption, RunsFolder
from pipelines.inspect.run_folders import RUNS
from pipelines.present.output import Report, table


def compare_command(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Two runs or more, by name.")],
    folder: RunsFolder = RUNS,
    json: JsonOption = False,
) -> Report:
    """Compare runs side by side: reward, accuracy, staleness, speed, audit. `laminar report` adds their curves.

    \b
    Examples:
      laminar runs compare first second
      laminar runs compare first second third --json
    """
    from pipelines.inspect.run_folders import find_run
    from pipelines.present.report.comparison import ComparedRun, text_rows
    from pipelines.present.report.html import LABELS
    from pipelines.present.report.summary import read_summary

    compared = [ComparedRun(name, read_summary(find_run(folder, name).folder), ()) for name in runs]
    data = [{key: each.summary.get(key) for key in ("run", *LABELS)} for each in compared]
    return Report(data, lambda: table(text_rows(compared), ["metric", *runs]), as_json=json)
