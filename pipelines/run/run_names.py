"""The name of a new run. Checked first: it needs none of the libraries that a run imports."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

from pipelines.config import Config
from pipelines.inspect.run_files import CONFIG_FILE, STATE_FILE, SUBMITTED
from pipelines.inspect.run_folders import read_run, run_command
from schemas.release import OldRelease

UNNAMED = "run.name is not set: it names the topics to read and write"
"""Why a role that is started alone cannot run without a run name."""


def with_run_name(config: Config, file: Path) -> Config:
    """`config` with a run name; the default is made from the name of its file and the time."""
    if config.run.name:
        return config
    stem = re.sub("[^A-Za-z0-9]+", "-", file.stem).strip("-")[:40] or "run"
    return with_free_name(replace(config, run=replace(config.run, name=f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}")))


def with_free_name(config: Config) -> Config:
    """`config`; if its run's folder exists already, with the first suffix of the name (-2, -3) that gives a new one."""
    name, number = config.run.name, count(2)
    while os.path.lexists(config.run_folder):
        config = replace(config, run=replace(config.run, name=f"{name}-{next(number)}"))
    return config


def name_problems(config: Config) -> Iterator[str]:
    """That a run of this name exists, unless it ended before its topics."""
    folder = config.run_folder
    if os.path.isdir(folder / SUBMITTED) or (os.path.exists(folder / STATE_FILE) and not is_unused(folder)):
        yield (
            f"run {config.run.name!r} exists already in {config.run.folder}: choose another run.name, or resume it: "
            f"`{run_command(config.run_folder, 'runs resume')}`"
        )


def is_unused(folder: Path) -> bool:
    """Whether `folder` is of a run that has ended, or was killed, before its topics were created: in its checks."""
    if any((folder / name).exists() for name in (CONFIG_FILE, "checkpoints")):
        return False
    try:
        return read_run(folder).status in ("stopped", "failed", "died")
    except (ValueError, OldRelease):
        return False
