"""state.json: the state of a run for other commands, during the run and after it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from infra.files import write_even_if_disk_full
from pipelines.inspect.run_files import LATEST, STATE_FILE
from pipelines.inspect.run_state.learning import WARN_STEPS
from schemas.release import RELEASE


@dataclass
class RunStateFile:
    """The state of a run in `folder`, rewritten at every change."""

    folder: Path
    run: str
    goal: int
    bootstrap_servers: str = ""
    client_properties: str = ""
    phase: str = "starting"
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each completed phase."""
    roles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    error: str | None = None
    warn_steps: int = WARN_STEPS
    audit: Mapping[str, float] = field(default_factory=dict)
    """The counts of the last background audit."""
    _phase_since: float = field(default_factory=time.monotonic)

    def enter_phase(self, phase: str) -> None:
        now = time.monotonic()
        self.phases[self.phase] = self.phases.get(self.phase, 0.0) + now - self._phase_since
        self.phase, self._phase_since = phase, now
        self.write()

    def set_roles(self, roles: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the state of the processes."""
        if roles != self.roles:
            self.roles = roles
            self.write()

    def set_audit(self, counts: Mapping[str, float]) -> None:
        """Set the counts of the last background audit."""
        self.audit = counts
        self.write()

    def end(self, error: str | None = None, phase: str = "") -> None:
        """Record the end of the run, when all its processes have ended."""
        self.ended_at, self.error = time.time(), error
        ended = {"pid": None, "alive": False, "status": "ended"}
        self.roles = {name: {**role, **ended} for name, role in self.roles.items()}
        self.enter_phase(phase or ("failed" if error else "ended"))

    def is_own(self) -> bool:
        """Whether state.json is of this process: once its run has ended, another start may have replaced it."""
        with suppress(OSError, ValueError):
            state = json.loads((self.folder / STATE_FILE).read_text("utf-8"))
            return bool((state["pid"], state["host"]) == (os.getpid(), os.uname().nodename))
        return False

    def write(self) -> None:
        state = {
            "release": RELEASE,
            "run": self.run,
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "pid_created": psutil.Process().create_time(),
            "bootstrap_servers": self.bootstrap_servers,
            "client_properties": self.client_properties,
            "phase": self.phase,
            "phases": self.phases,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "error": self.error,
            "audit": self.audit,
            "roles": self.roles,
            "goal": {"optimizer_steps": self.goal},
            "warn_steps": self.warn_steps,
        }
        write_even_if_disk_full(self.folder / STATE_FILE, json.dumps(state, indent=1))


@contextmanager
def runs_locked(runs: Path) -> Iterator[None]:
    """Hold the lock of the folder `runs`, under which a start takes the folder of its run; others wait for it."""
    with ExitStack() as stack:
        with suppress(OSError):  # of a file system without locks
            descriptor = os.open(runs, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def link_latest(folder: Path) -> Path | None:
    """Link `latest`, beside the run folder `folder`, to it. Returns the folder that it named before, or None."""
    latest = folder.parent / LATEST
    before = latest.resolve() if latest.is_symlink() and latest.is_dir() else None
    partial = folder.parent / f".latest.{os.getpid()}"
    partial.unlink(missing_ok=True)
    partial.symlink_to(folder.name)
    partial.replace(latest)
    return before


def remove_run(folder: Path, before: Path | None) -> None:
    """Remove the folder of a run that wrote no topic; `latest` names `before` again, or nothing."""
    latest = folder.parent / LATEST
    if latest.is_symlink() and latest.resolve() == folder.resolve():
        latest.unlink()
        if before is not None:
            link_latest(before)
    shutil.rmtree(folder, ignore_errors=True)
