"""Pipelines that were submitted detached (`laminar submit --detach`), each a file in the run's folder.

submitted/score.json     what was requested, which process supervises it, and its state
submitted/score.toml     the whole configuration at that time
logs/score.log           its log
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from infra.files import write_atomically
from pipelines.inspect.run_files import LOGS, SUBMITTED
from pipelines.inspect.run_folders import process_of
from pipelines.roles import ALL_PIPELINES, DATA_PLANE, Role

if TYPE_CHECKING:
    import psutil

State = Literal["up", "ended", "failed"]


@dataclass(frozen=True)
class Submission:
    """A submitted role of the run in `folder`; `state` is what its respawner wrote last, `error` why it failed."""

    folder: Path
    pipeline: str
    index: int
    runner: str
    options: tuple[str, ...] = ()
    pid: int | None = None
    pid_created: float = 0.0
    restarts: int = 0
    state: State = "up"
    error: str | None = None

    @property
    def role(self) -> Role:
        """The role; the data plane counts as one."""
        return Role(self.pipeline, self.index)

    @property
    def file(self) -> Path:
        """The file of this record."""
        return self.folder / SUBMITTED / f"{self.role.name}.json"

    @property
    def config(self) -> Path:
        """Its configuration file."""
        return self.file.with_suffix(".toml")

    @property
    def log(self) -> Path:
        """The log of the pipeline and its respawner."""
        return self.folder / LOGS / f"{self.role.name}.log"

    @property
    def status(self) -> str:
        """`up`; `ended`: drained or stopped; `failed`: not restarted; `died`: its respawner ended without a report."""
        return "died" if self.state == "up" and self.respawner() is None else self.state

    def respawner(self) -> psutil.Process | None:
        """The respawner process, None if it has ended."""
        return process_of({"pid": self.pid, "pid_created": self.pid_created})

    def write(self) -> None:
        """Write the file."""
        fields = {**asdict(self), "folder": str(self.folder)}
        write_atomically(self.file, json.dumps(fields, indent=1))


def submissions(folder: Path) -> list[Submission]:
    """The detached submissions of the run in `folder`, in drain order."""
    found = [read_submission(file) for file in sorted((folder / SUBMITTED).glob("*.json"))]
    order = (*ALL_PIPELINES, DATA_PLANE)
    return sorted(found, key=lambda each: (order.index(each.pipeline), each.index))


def read_submission(file: Path) -> Submission:
    """The submission in `file`. Raises ValueError if it is damaged."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        return Submission(**{**fields, "folder": Path(fields["folder"]), "options": tuple(fields["options"])})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
