"""`laminar runs compare`: compare runs side by side."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelines.cli.options import JsonOption, RunsFolder
from pipelines.cli.report import read_compared
from pipelines.inspect.run_files import CONFIG_FILE
from pipelines.inspect.run_folders import RUNS, config_file
from pipelines.present.output import Report, table

MOST_SETTINGS = 10


def compare_command(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Two runs or more, by name.")],
    folder: RunsFolder = RUNS,
    json: JsonOption = False,
) -> Report:
    """Compare runs side by side: reward, accuracy, tasks, KL, staleness, speed, audit, and the settings that differ.
    `laminar report` adds their curves.

    \b
    Examples:
      laminar runs compare first second
      laminar runs compare first second third --json
    """
    from rich.console import Group
    from rich.text import Text

    from pipelines.inspect.run_folders import find_run
    from pipelines.present.report.comparison import text_rows
    from pipelines.present.report.html import LABELS

    found = [find_run(folder, name) for name in runs]
    folders = [each.folder for each in found]
    compared = [read_compared(each, name, folder) for each, name in zip(found, runs, strict=True)]
    data = [{key: each.summary.get(key) for key in ("run", *LABELS, "tasks", "components")} for each in compared]

    def text() -> Any:
        settings = (line for other in folders[1:] for line in ("", *_settings(folders[0], other)))
        lines = [Text(line, no_wrap=True, overflow="ignore") for line in settings]
        return Group(table(text_rows(compared), ["metric", *runs]), *lines)

    return Report(data, text, as_json=json)


def _settings(first: Path, second: Path) -> Iterator[str]:
    """Yield the settings that differ between two runs, the first `MOST_SETTINGS`, and the command that shows all."""
    from pipelines.cli.config import difference_lines
    from pipelines.config import ConfigError
    from pipelines.config_difference import difference_of_files
    from pipelines.inspect.run_folders import laminar_command

    command = f"`{laminar_command()} config --diff {shlex.quote(str(first))} {shlex.quote(str(second))}`"
    try:
        files = [config_file(each) or each / CONFIG_FILE for each in (first, second)]
        lines = difference_lines(difference_of_files(*files))
    except ConfigError as error:  # of an earlier release, or a run that wrote none
        yield f"The settings cannot be compared: {error}"
        return
    yield f"Settings of {first.name} -> {second.name}: {len(lines) or 'none'} differ ({command})"
    yield from (f"  {line}" for line in lines[:MOST_SETTINGS])
    if len(lines) > MOST_SETTINGS:
        yield f"  and {len(lines) - MOST_SETTINGS} more"
