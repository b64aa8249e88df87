"""Pipelines that were submitted detached (`laminar submit --detach`), each a file in the run's folder.

submitted/score.json     what was requested, its respawner and its process, and its state
submitted/score.toml     the whole configuration at that time
submitted/score.inputs   the fingerprints of the files that it reads
submitted/first          empty; written once, at the start of the run
logs/score.log           its log
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from infra.files import write_even_if_disk_full
from pipelines.inspect.run_files import FIRST_SUBMITTED, LOGS, SUBMITTED
from pipelines.inspect.run_folders import process_of
from pipelines.roles import ALL_PIPELINES, DATA_PLANE, Role, submitted_process

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psutil

    from pipelines.config import Config

JobState = Literal["up", "ended", "failed", "removed"]
SubmissionStatus = Literal["up", "unsupervised", "died", "ended", "failed", "removed"]


@dataclass(frozen=True)
class Submission:
    """A submitted role of the run in `folder`; `state` is what was written last, `error` why it failed.

    `pid` is its respawner, `worker` the process of the pipeline, which the respawner starts. `last_error` is why the
    process ended before its last restart, at `last_ended_at` in Unix seconds. `ended_at` is its own end, `down_s` the
    seconds in which no role of the run worked before it was started again.
    """

    folder: Path
    pipeline: str
    index: int
    runner: str
    options: tuple[str, ...] = ()
    pid: int | None = None
    pid_created: float = 0.0
    worker: int | None = None
    worker_created: float = 0.0
    restarts: int = 0
    state: JobState = "up"
    error: str | None = None
    last_error: str | None = None
    last_ended_at: float | None = None
    ended_at: float | None = None
    down_s: float = 0.0

    @property
    def role(self) -> Role:
        """The role; the data plane counts as one."""
        return Role(self.pipeline, self.index)

    def roles(self, config: Config) -> Sequence[Role]:
        """The roles that it runs with `config`."""
        return submitted_process(config, self.pipeline, self.index).roles

    @property
    def file(self) -> Path:
        """The file of this record."""
        return self.folder / SUBMITTED / f"{self.role.name}.json"

    @property
    def config(self) -> Path:
        """Its configuration file."""
        return self.file.with_suffix(".toml")

    @property
    def inputs(self) -> Path:
        """The record of the files that it reads."""
        return self.file.with_suffix(".inputs")

    @property
    def log(self) -> Path:
        """The log of the pipeline and its respawner."""
        return self.folder / LOGS / f"{self.role.name}.log"

    @property
    def status(self) -> SubmissionStatus:
        """`up`; `unsupervised`: its process works, but its respawner has ended; `died`: both have, without a report;
        `ended`: drained or stopped; `failed`: not restarted; `removed`: ended for good.
        """
        if self.state != "up" or self.respawner() is not None:
            return self.state
        return "died" if self.working_process() is None else "unsupervised"

    def respawner(self) -> psutil.Process | None:
        """The respawner process, None if it has ended."""
        return process_of({"pid": self.pid, "pid_created": self.pid_created})

    def working_process(self) -> psutil.Process | None:
        """The process of the pipeline, None if it has ended."""
        return process_of({"pid": self.worker, "pid_created": self.worker_created})

    def ended(self, state: JobState, error: str | None = None) -> Submission:
        """The same at its end."""
        return replace(self, state=state, error=error, ended_at=time.time())

    def write(self) -> None:
        """Write the file; the first one of a run dates its start."""
        date_start(self.folder)
        fields = {**asdict(self), "folder": str(self.folder)}
        write_even_if_disk_full(self.file, json.dumps(fields, indent=1))


def stop_time_s(submitted: Sequence[Submission], otherwise_s: float) -> float:
    """Seconds that the end of all of `submitted` may take: `otherwise_s`, and those of a job with one on Flink."""
    from infra.runners.flink_jobs import CANCEL_S  # with a client of HTTP

    return otherwise_s + (CANCEL_S if any(each.runner == "flink" for each in submitted) else 0.0)


def date_start(folder: Path) -> None:
    """Date the start of the run in `folder`, whose first role is submitted, unless that has been done."""
    if not (first := folder / FIRST_SUBMITTED).exists():
        first.touch()


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
