"""state.json: what other commands know of a run while it goes on, and after it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from infra.files import write_even_if_disk_full

STATE_FILE = "state.json"


@dataclass
class RunStateFile:
    """The state of a run in `folder`, written whole at every change."""

    folder: Path
    run: str
    goal: int
    bootstrap_servers: str = ""
    client_properties: str = ""
    phase: str = "starting"
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each phase that is over."""
    roles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    error: str | None = None
    audit: Mapping[str, float] = field(default_factory=dict)
    """The numbers of the last audit while the run was at work."""
    _phase_since: float = field(default_factory=time.monotonic)

    def enter(self, phase: str) -> None:
        """Go on to `phase`."""
        now = time.monotonic()
        self.phases[self.phase] = self.phases.get(self.phase, 0.0) + now - self._phase_since
        self.phase, self._phase_since = phase, now
        self.write()

    def see(self, roles: Mapping[str, Mapping[str, Any]]) -> None:
        """The processes are these now."""
        if roles != self.roles:
            self.roles = roles
            self.write()

    def audited(self, numbers: Mapping[str, float]) -> None:
        """An audit of the run so far has found these."""
        self.audit = numbers
        self.write()

    def end(self, error: str | None = None, phase: str = "") -> None:
        """The run is over: no process is left of it."""
        self.ended_at, self.error = time.time(), error
        ended = {"pid": None, "alive": False, "status": "ended"}
        self.roles = {name: {**role, **ended} for name, role in self.roles.items()}
        self.enter(phase or ("failed" if error else "ended"))

    def write(self) -> None:
        """Write the file."""
        state = {
            "run": self.run,
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
        }
        write_even_if_disk_full(self.folder / STATE_FILE, json.dumps(state, indent=1))


def link_latest(folder: Path) -> None:
    """Let `latest` beside run folder `folder` point to it."""
    partial = folder.parent / f".latest.{os.getpid()}"
    partial.unlink(missing_ok=True)
    partial.symlink_to(folder.name)
    partial.replace(folder.parent / "latest")
