"""A fleet without processes, which records what it is asked for."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from pipelines.roles import RoleProcess
from pipelines.run.fleet import FleetMember


class RecordedFleet:
    """A member runs once it was added, and drains until `end`."""

    def __init__(self) -> None:
        self.members: dict[str, FleetMember] = {}
        self.calls: list[str] = []

    def add(self, process: RoleProcess) -> None:
        self.calls.append(f"add {process.name}")
        self.members[process.name] = FleetMember(process, pid=1, alive=True)

    def stop(self, names: Iterable[str], signal_number: int = signal.SIGTERM) -> None:
        for name in names:
            self.calls.append(f"{'kill' if signal_number == signal.SIGKILL else 'stop'} {name}")
            self.members[name].wanted = False

    def end(self, *names: str) -> None:
        for name in names:
            self.members[name].pid, self.members[name].alive = None, False
