"""Pipelines that were submitted detached (`laminar submit --detach`), each a file in the run's folder.

submitted/score.json     what was requested, which process supervises it, and its state
submitted/score.toml     the whole configuration at that time
logs/score.log           its log
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from infra.files import write_atomically
from infra.processes import is_running
from pipelines.roles import PIPELINES, Role

FOLDER = "submitted"
SAME_START_S = 1.0
Stand = Literal["up", "ended", "failed"]


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
        return "died" if self.stand == "up" and self.respawner() is None else self.stand

    def respawner(self) -> psutil.Process | None:
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
