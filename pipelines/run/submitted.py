"""Pipelines that were submitted to stay (`laminar submit --detach`), each a file in the run's folder.

    submitted/score.json     what was asked for, which process keeps it, and how it stands
    submitted/score.toml     the configuration as it was then, whole
    logs/score.log           what it says

The process is a keeper (`keeper.py`): it submits the pipeline, and submits it again when its job has ended unasked. So
a job that the runner lost is found again; after a machine's restart `laminar runs resume` starts the keepers anew.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from infra.files import write_atomically
from infra.processes import is_running, spawn
from pipelines.config import Config, save_config
from pipelines.roles import PIPELINES, Role
from pipelines.run.paths import with_whole_paths

FOLDER = "submitted"
SAME_START_S = 1.0
Stand = Literal["up", "ended", "failed"]


class AlreadyThere(RuntimeError):
    """The role is kept already."""


@dataclass(frozen=True)
class Submission:
    """A role that is kept in the run in `folder`; `stand` is what its keeper said last, `error` why it gave up."""

    folder: Path
    pipeline: str
    index: int
    runner: str
    options: tuple[str, ...] = ()
    pid: int | None = None
    pid_created: float = 0.0
    restarts: int = 0
    stand: Stand = "up"
    error: str | None = None

    @property
    def role(self) -> Role:
        """Which role it is."""
        return Role(self.pipeline, self.index)

    @property
    def file(self) -> Path:
        """Where this stands."""
        return self.folder / FOLDER / f"{self.role.name}.json"

    @property
    def config(self) -> Path:
        """Its configuration."""
        return self.file.with_suffix(".toml")

    @property
    def log(self) -> Path:
        """What it and its keeper say."""
        return self.folder / "logs" / f"{self.role.name}.log"

    @property
    def status(self) -> str:
        """`up`; `ended` by itself or asked to; `failed` and given up; `died`: its keeper is gone and said nothing."""
        return "died" if self.stand == "up" and self.keeper() is None else self.stand

    def keeper(self) -> psutil.Process | None:
        """The process that keeps it, if it is still that one."""
        if self.pid is None:
            return None
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.pid_created) <= SAME_START_S
        except psutil.Error:
            return None
        return process if same and is_running(process) else None

    def write(self) -> None:
        """Set this down."""
        said = {**asdict(self), "folder": str(self.folder)}
        write_atomically(self.file, json.dumps(said, indent=1))


def detach(config: Config, role: Role, runner: str, options: Sequence[str]) -> Submission:
    """Keep `role` of `config`'s run on `runner` from now on. Raises AlreadyThere."""
    config = with_whole_paths(config)
    made = Submission(config.run_folder, role.pipeline, role.index, runner, tuple(options))
    for before in submissions(config.run_folder):
        if before.file == made.file and before.keeper() is not None:
            raise AlreadyThere(f"{role.name} of run {config.run.name} is kept by process {before.pid} already")
    made.file.parent.mkdir(parents=True, exist_ok=True)
    save_config(config, made.config)
    return keep(made)


def keep(submission: Submission) -> Submission:
    """Start a keeper for `submission`."""
    submission.log.parent.mkdir(parents=True, exist_ok=True)
    submission = replace(submission, pid=None, stand="up", error=None)
    submission.write()
    process = spawn(
        [sys.executable, "-m", "pipelines.run.keeper", str(submission.file)], submission.log, die_with_parent=False
    )
    kept = replace(submission, pid=process.pid, pid_created=process.create_time())
    kept.write()
    return kept


def submissions(folder: Path) -> list[Submission]:
    """What was submitted to stay of the run in `folder`, in the order in which pipelines drain."""
    found = [read_submission(file) for file in sorted((folder / FOLDER).glob("*.json"))]
    return sorted(found, key=lambda each: (PIPELINES.index(each.pipeline), each.index))


def read_submission(file: Path) -> Submission:
    """The submission in `file`. Raises ValueError where it does not read."""
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        return Submission(**{**said, "folder": Path(said["folder"]), "options": tuple(said["options"])})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def stop(submission: Submission, deadline: float) -> bool:
    """Ask `submission` to drain and wait for its keeper until `deadline` (monotonic); whether it is gone."""
    process = submission.keeper()
    if process is None:
        return True
    process.send_signal(signal.SIGTERM)
    while is_running(process):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True
