"""Lists the run folders, reads their state, and stops a run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipelines.inspect.run_files import (
    AUDIT_FILE,
    AUDIT_SO_FAR_FILE,
    CONFIG_FILE,
    FIRST_SUBMITTED,
    LATEST,
    LOGS,
    REPORT_FILE,
    STATE_FILE,
    SUBMITTED,
    ZYGOTE_LOG,
)
from pipelines.inspect.run_state.learning import WARN_STEPS
from pipelines.inspect.run_times import NOT_RUNNING, downtime_s
from schemas.release import OldRelease

if TYPE_CHECKING:
    import psutil

    from pipelines.inspect.submissions import Submission

RUNS = Path("runs")
"""The folder of the runs in the working directory."""
SAME_START_S = 1.0
"""A larger difference between a process's start and state.json means that its pid was reused."""

Status = Literal["running", "ended", "stopped", "failed", "died", "unreadable", "deleting"]


class NoSuchRun(RuntimeError):
    """The folder of runs has no run of this name."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder, its state from state.json, and its status.

    stopped: by a person, before its goal. died: the supervisor process is gone, but has not recorded the run's end.
    unreadable: state.json is damaged. deleting: `laminar runs delete` was killed; its folder is `being_deleted`.
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
    def downtime_s(self) -> float:
        """The seconds between its ends and its resumptions."""
        return downtime_s(self.state.get("phases"))

    @property
    def supervised(self) -> bool:
        """Whether `laminar run` started it, and not `laminar submit --detach`."""
        return (self.folder / STATE_FILE).exists()

    @property
    def other_host(self) -> str | None:
        """The host, or container, on which it runs, if that is another one."""
        return _other_host(self.state) if self.status == "running" and process_of(self.state) is None else None

    @property
    def reached(self) -> bool:
        """Whether `laminar run` has run it to its goal and written the report."""
        return self.supervised and self.status == "ended" and (self.folder / REPORT_FILE).exists()

    @property
    def goal(self) -> int | None:
        goal = self.state.get("goal") or {}
        return goal.get("optimizer_steps")

    @property
    def warn_steps(self) -> int:
        """`run.warn_steps` of its configuration."""
        return int(self.state.get("warn_steps", WARN_STEPS))


def read_run(folder: Path) -> RunFolder:
    """The run in `folder`. Raises NoSuchRun if there is none, OldRelease, ValueError if its state.json is damaged."""
    path = folder / STATE_FILE
    if not path.exists() and (folder / SUBMITTED).is_dir():
        return _read_submitted(folder)
    try:
        state = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        from infra.name_lookup import suggest_name

        known = [file.parent.name for file in folder.parent.glob(f"[!.]*/{STATE_FILE}")]
        hint = suggest_name(folder.name, known, 0)
        raise NoSuchRun(f"there is no run {folder.name!r} under {folder.parent}/ ({path} is missing{hint})") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; {_remedy(folder)}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds no JSON object; {_remedy(folder)}")
    check_release(state, path)
    return RunFolder(folder, state, _status(folder, state))


def check_release(state: Mapping[str, Any], path: Path) -> None:
    """Raise OldRelease if `state`, read from `path`, is of release 0.1.0, which wrote no `release`."""
    if "run" in state and "release" not in state:
        raise OldRelease(str(path))


def list_runs(runs: Path) -> list[RunFolder]:
    """The runs under `runs`, newest first. One with a damaged state.json is `unreadable`; its state has the error."""
    found = {path.parent for name in (STATE_FILE, SUBMITTED) for path in runs.glob(f"[!.]*/{name}")}
    folders = sorted(folder for folder in found if not folder.is_symlink())
    deleting = [
        RunFolder(folder, {"run": folder.name[1 : -len(_DELETING)]}, "deleting")
        for folder in sorted(runs.glob(f".*{_DELETING}"))
        if folder.is_dir() and not folder.is_symlink()
    ]
    return [*sorted(map(read_any, folders), key=lambda run: run.started_at, reverse=True), *deleting]


_DELETING = ".deleting"


def being_deleted(folder: Path) -> Path:
    """The folder that `laminar runs delete` makes of the run's `folder` until all its files are gone."""
    return folder.with_name(f".{folder.name}{_DELETING}")


def read_any(folder: Path) -> RunFolder:
    """As `read_run`; a run with a damaged state.json, or of an old release, is `unreadable`. Raises NoSuchRun."""
    try:
        return read_run(folder)
    except (OSError, ValueError, OldRelease) as error:
        return RunFolder(folder, {"run": folder.name, "error": str(error)}, "unreadable")


def folder_of(runs: Path, run: str | None) -> Path:
    """The folder of `run`: the name of a run under `runs`, or a path with a slash. None: the latest under `runs`.

    Raises NoSuchRun if there is no latest; another folder need not exist.
    """
    if run is not None:
        return Path(run) if "/" in run else runs / run
    if (runs / LATEST).exists():
        return runs / (runs / LATEST).resolve().name
    known = [each for each in list_runs(runs) if each.status != "deleting"]
    if not known:
        raise NoSuchRun(f"there is no run yet under {runs}/: name a run of another folder by its path, --run DIR/NAME")
    return known[0].folder


def config_file(folder: Path) -> Path | None:
    """The configuration of the run in `folder`: of `laminar run`, or of a submitted pipeline.

    Of the submitted ones the trainer's comes first, since it says where the checkpoints are.
    """
    submitted = folder / SUBMITTED
    files = (folder / CONFIG_FILE, submitted / "trainer.toml", *sorted(submitted.glob("*.toml")))
    return next((file for file in files if file.is_file()), None)


def newest_audit(folder: Path) -> dict[str, Any] | None:
    """The audit at the end of the run in `folder`, or the newest one in the background, with its time `at` (Unix
    seconds); None without any."""
    for file in (folder / AUDIT_FILE, folder / AUDIT_SO_FAR_FILE):
        with suppress(FileNotFoundError):
            return {**json.loads(file.read_bytes()), "at": file.stat().st_mtime}
    return None


def run_argument(folder: Path) -> str:
    """How a command in the working directory names the run in `folder` after --run: by name, or by path."""
    here, folder = Path.cwd(), folder.absolute()
    if folder.parent == here / RUNS:
        return folder.name
    if not folder.is_relative_to(here) or folder == here:
        return str(folder)
    relative = str(folder.relative_to(here))
    return relative if "/" in relative else f"./{relative}"


def laminar_command() -> str:
    """The command `laminar` as the user must write it: with its path, quoted, if the shell would not find it."""
    if shutil.which("laminar"):
        return "laminar"
    here, command = Path.cwd(), Path(sys.executable).with_name("laminar")
    return shlex.quote(str(command.relative_to(here) if command.is_relative_to(here) else command))


def run_command(folder: Path, words: str, options: str = "") -> str:
    """The command `laminar WORDS` for the run in `folder`, which works unchanged in the working directory."""
    command = f"{laminar_command()} {words} --run {shlex.quote(run_argument(folder))}"
    return f"{command} {options}" if options else command


def _remedy(folder: Path) -> str:
    return f"`{run_command(folder, 'runs resume')}` resumes the run and rewrites the file"


def find_run(runs: Path, run: str | None) -> RunFolder:
    """The run in `folder_of(runs, run)`. Raises NoSuchRun, ValueError."""
    return read_run(folder_of(runs, run))


def find_run_to_resume(runs: Path, name: str | None) -> RunFolder:
    """As `find_run`, but a run with a damaged state.json has died: resuming does not need the file."""
    try:
        return find_run(runs, name)
    except ValueError:
        return RunFolder(folder_of(runs, name), {}, "died")


def process_of(state: Mapping[str, Any]) -> psutil.Process | None:
    """The process that `state` names by `pid` and `pid_created`; None if it has ended or its pid was reused."""
    import psutil  # deferred: commands that are given the address of Kafka do not need it

    from infra.processes import is_running

    pid, created = state.get("pid"), state.get("pid_created")
    if not isinstance(pid, int) or pid <= 0:
        return None
    try:
        process = psutil.Process(pid)
        same = created is None or abs(process.create_time() - created) <= SAME_START_S
    except psutil.Error:
        return None
    return process if same and is_running(process) else None


def stop_run(run: RunFolder, timeout_s: float) -> bool:
    """Send SIGTERM to a run's supervisor, which then stops its roles, and wait. Returns whether it has ended.

    Does nothing if the run is not running. Raises PermissionError for another user's process, RuntimeError for a run of
    another host.
    """
    import psutil

    if (host := run.other_host) is not None:
        raise RuntimeError(f"run {run.run} runs on {host}: stop it there")
    process = process_of(run.state)
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
    return has_ended(process, time.monotonic() + timeout_s)


def has_ended(process: psutil.Process, deadline: float) -> bool:
    """Wait until `process` has ended, or until `deadline` (monotonic). Returns whether it has ended."""
    from infra.processes import is_running

    while is_running(process):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _read_submitted(folder: Path) -> RunFolder:
    """A run of detached submissions; its status is the worst of theirs."""
    from pipelines.inspect.submissions import submissions  # deferred: most runs have none, and it imports more

    found = submissions(folder)
    active = [each for each in found if each.status != "removed"]
    roles = {each.role.name: _submitted_role(each) for each in found}
    foreground = _foreground_roles(folder)
    roles |= foreground
    statuses = {each.status for each in active} | {role["status"] for role in foreground.values()}
    worst: tuple[tuple[str, Status], ...] = (
        ("failed", "failed"),
        ("died", "died"),
        ("unsupervised", "running"),
        ("up", "running"),
    )
    status: Status = next((result for role_status, result in worst if role_status in statuses), "ended")
    working = [name for name, role in roles.items() if role["alive"]]
    phase = "training" if working and all(_is_ready(folder, name) for name in working) else "starting"
    files = [folder / SUBMITTED / f"{name}.toml" for name in foreground]
    started_at = min([each.pid_created for each in found] or [file.stat().st_mtime for file in files], default=0.0)
    with suppress(FileNotFoundError):  # of runs of earlier releases
        started_at = (folder / FIRST_SUBMITTED).stat().st_mtime
    errors = "; ".join(f"{each.role.name}: {each.error}" for each in found if each.error) or None
    state = {
        "run": folder.name,
        "roles": roles,
        "phase": phase if working else status,
        "started_at": started_at,
        "ended_at": None if working else max((_last_alive_at(each) for each in found), default=0.0) or None,
        "phases": {NOT_RUNNING: sum(each.down_s for each in found)},
        "error": errors,
    }
    newest = max(found, key=lambda each: each.pid_created, default=None)
    return RunFolder(folder, {**state, **_configured(newest.config if newest else config_file(folder))}, status)


def _foreground_roles(folder: Path) -> dict[str, dict[str, Any]]:
    """The roles that `laminar submit` without --detach has run: they have a configuration, and no respawner."""
    from infra.runners.liveness import read_liveness, working_pid
    from pipelines.roles import liveness_file

    roles = {}
    for file in sorted((folder / SUBMITTED).glob("*.toml")):
        if not file.with_suffix(".json").exists():
            pid = working_pid(read_liveness(liveness_file(folder, file.stem)))
            roles[file.stem] = {"pid": pid, "alive": pid is not None, "status": "ended" if pid is None else "up"}
    return roles


def _submitted_role(submission: Submission) -> dict[str, Any]:
    respawner, working = submission.respawner(), submission.working_process()
    return {
        "pid": None if working is None else working.pid,
        "respawner": None if respawner is None else respawner.pid,
        "restarts": submission.restarts,
        "alive": submission.status in ("up", "unsupervised"),
        "status": submission.status,
        "error": submission.error,
        "last_error": submission.last_error,
        "last_ended_at": submission.last_ended_at,
        "log": str(submission.log),
    }


def _last_alive_at(submission: Submission) -> float:
    """When the role has ended or, if it was killed, last reported, in Unix seconds; 0 if neither is known."""
    from pipelines.roles import liveness_file

    times = [submission.ended_at or 0.0]
    with suppress(OSError):  # a process that ends removes it
        times.append(liveness_file(submission.folder, submission.role.name).stat().st_mtime)
    return max(times)


def _is_ready(folder: Path, role: str) -> bool:
    """Whether the process of `role` has restored its state and works."""
    from infra.runners.liveness import read_liveness
    from pipelines.roles import liveness_file

    return bool((read_liveness(liveness_file(folder, role)) or {}).get("ready"))


def _configured(file: Path | None) -> dict[str, Any]:
    """What the configuration `file` says of a submitted run: name, Kafka and goal; nothing without a file."""
    if file is None or not file.is_file():
        return {}
    from pipelines.roles import ADMIN, ROLE

    table = tomllib.loads(file.read_text("utf-8"))
    kafka = table.get("kafka", {})
    return {
        "run": table.get("run", {}).get("name"),
        "bootstrap_servers": kafka.get("bootstrap_servers", ""),
        "client_properties": kafka.get("client_properties", "").replace(ROLE, ADMIN),
        "goal": {"optimizer_steps": table.get("trainer", {}).get("optimizer_steps")},
        "warn_steps": table.get("run", {}).get("warn_steps", WARN_STEPS),
    }


def _status(folder: Path, state: Mapping[str, Any]) -> Status:
    if state.get("ended_at") is not None:
        return "stopped" if state.get("phase") == "stopped" else "failed" if state.get("error") else "ended"
    from infra.processes import is_locked

    elsewhere = _other_host(state) is not None and is_locked(folder / LOGS / ZYGOTE_LOG)
    return "running" if elsewhere or process_of(state) is not None else "died"


def _other_host(state: Mapping[str, Any]) -> str | None:
    host = state.get("host")
    return host if isinstance(host, str) and host != os.uname().nodename else None
