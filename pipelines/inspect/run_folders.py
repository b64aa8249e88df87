"""Lists the run folders, reads their state, and stops a run."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from infra.processes import is_running
from pipelines.inspect.run_files import REPORT_FILE, STATE_FILE, SUBMITTED
from schemas.release import OldRelease

SAME_START_S = 1.0
"""A larger difference between a process's start and state.json means that its pid was reused."""

_REMEDY = "`laminar runs resume --run {run}` resumes the run and rewrites the file"
Status = Literal["running", "ended", "failed", "died", "unreadable"]


class NoSuchRun(RuntimeError):
    """The folder of runs has no run of this name."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder, its state from state.json, and its status.

    died: the supervisor process is gone, but has not recorded the end of the run. unreadable: state.json is damaged.
    """

    folder: Path
    state: Mapping[str, Any]
    status: Status

    @property
    def run(self) -> str:
        return str(self.state.get("run") or self.folder.name)

    @property
    def started_at(self) -> float:
        return float(self.state.get("started_at") or 0.0)

    @property
    def supervised(self) -> bool:
        """Whether `laminar run` started it, and not `laminar submit --detach`."""
        return (self.folder / STATE_FILE).exists()

    @property
    def reached(self) -> bool:
        """Whether `laminar run` has run it to its goal and written the report."""
        return self.supervised and self.status == "ended" and (self.folder / REPORT_FILE).exists()

    @property
    def goal(self) -> int | None:
        goal = self.state.get("goal") or {}
        return goal.get("optimizer_steps")


def read_run(folder: Path) -> RunFolder:
    """The run in `folder`. Raises NoSuchRun if there is none, OldRelease, ValueError if its state.json is damaged."""
    path = folder / STATE_FILE
    if not path.exists() and (folder / SUBMITTED).is_dir():
        return _read_submitted(folder)
    try:
        state = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise NoSuchRun(f"there is no run {folder.name!r} under {folder.parent}/ ({path} is missing)") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; {_REMEDY.format(run=folder.name)}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds no JSON object; {_REMEDY.format(run=folder.name)}")
    check_release(state, path)
    return RunFolder(folder, state, _status(state))


def check_release(state: Mapping[str, Any], path: Path) -> None:
    """Raise OldRelease if `state`, read from `path`, is of release 0.1.0, which wrote no `release`."""
    if "run" in state and "release" not in state:
        raise OldRelease(str(path))


def list_runs(runs: Path) -> list[RunFolder]:
    """The runs under `runs`, newest first. One with a damaged state.json is `unreadable`; its state has the error."""
    found = {path.parent for name in (STATE_FILE, SUBMITTED) for path in runs.glob(f"*/{name}")}
    folders = sorted(folder for folder in found if not folder.is_symlink())
    return sorted(map(_read_any, folders), key=lambda run: run.started_at, reverse=True)


def _read_any(folder: Path) -> RunFolder:
    try:
        return read_run(folder)
    except (OSError, ValueError, OldRelease) as error:
        return RunFolder(folder, {"run": folder.name, "error": str(error)}, "unreadable")


def find_run(runs: Path, name: str | None) -> RunFolder:
    """The run `name` under `runs`, or the latest if it is None. Raises NoSuchRun, ValueError."""
    if name is not None:
        return read_run(runs / name)
    if (runs / "latest").exists():
        return read_run(runs / (runs / "latest").resolve().name)
    known = list_runs(runs)
    if not known:
        raise NoSuchRun(f"there is no run yet under {runs}/")
    return known[0]


def find_run_to_resume(runs: Path, name: str | None) -> RunFolder:
    """As `find_run`, but a run with a damaged state.json has died: resuming does not need the file."""
    try:
        return find_run(runs, name)
    except ValueError:
        folder = (runs / "latest").resolve() if name is None else runs / name
        return RunFolder(runs / folder.name, {}, "died")


def supervisor_of(state: Mapping[str, Any]) -> psutil.Process | None:
    """The supervisor process of a run; None if it has ended or its pid was reused."""
    pid, created = state.get("pid"), state.get("pid_created")
    if not isinstance(pid, int) or pid <= 0:
        return None
    try:
        process = psutil.Process(pid)
        same = created is None or abs(process.create_time() - created) <= SAME_START_S
    except psutil.Error:
        return None
    return process if same and is_running(process) else None


def stop_run(
    run: RunFolder,
    timeout_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Send SIGTERM to a run's supervisor, which then stops its roles, and wait. Returns whether it has ended.

    Does nothing if the run is not running. Raises PermissionError for another user's process.
    """
    process = supervisor_of(run.state)
    if process is None:
        return True
    try:
        process.send_signal(signal.SIGTERM)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied as error:
        raise PermissionError(
            f"run {run.run} belongs to another user: process {process.pid} cannot be stopped"
        ) from error
    deadline = clock() + timeout_s
    while is_running(process):
        if clock() >= deadline:
            return False
        sleep(0.1)
    return True


def _read_submitted(folder: Path) -> RunFolder:
    """A run of detached submissions; its status is the worst of theirs."""
    from pipelines.inspect.submissions import submissions  # deferred: most runs have none, and it imports more

    active = submissions(folder)
    roles = {
        each.role.name: {
            "pid": each.pid if each.status == "up" else None,
            "restarts": each.restarts,
            "alive": each.status == "up",
            "status": each.status,
        }
        for each in active
    }
    statuses = {each.status for each in active}
    worst: tuple[tuple[str, Status], ...] = (("failed", "failed"), ("died", "died"), ("up", "running"))
    status: Status = next((result for role_status, result in worst if role_status in statuses), "ended")
    started_at = min((each.pid_created for each in active), default=0.0)
    errors = "; ".join(f"{each.role.name}: {each.error}" for each in active if each.error) or None
    state = {"run": folder.name, "roles": roles, "started_at": started_at, "error": errors}
    return RunFolder(folder, state, status)


def _status(state: Mapping[str, Any]) -> Status:
    if state.get("ended_at") is not None:
        return "failed" if state.get("error") else "ended"
    return "died" if supervisor_of(state) is None else "running"
