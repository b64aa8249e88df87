"""The name of a new run. Checked first: it needs none of the libraries that a run imports."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

from pipelines.config import Config, ConfigError
from pipelines.inspect.run_files import STATE_FILE
from pipelines.inspect.run_folders import run_command
from schemas.topics import run_prefix

UNNAMED = "run.name is not set: it names the topics to read and write"
"""Why a role that is started alone cannot run without a run name."""


def with_run_name(config: Config, file: Path) -> Config:
    """`config` with a run name; the default is made from the name of its file and the time."""
    if config.run.name:
        return config
    stem = re.sub("[^A-Za-z0-9]+", "-", file.stem).strip("-")[:40] or "run"
    return replace(config, run=replace(config.run, name=f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"))


def check_new(config: Config) -> None:
    """Raise ConfigError if the run exists or its name is not valid."""
    if (config.run_folder / STATE_FILE).exists():
        raise ConfigError(
            f"run {config.run.name!r} exists already in {config.run.folder}: choose another run.name, or resume it: "
            f"`{run_command(config.run_folder, 'runs resume')}`"
        )
    run_prefix(config.run.name)
