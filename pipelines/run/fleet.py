"""The fleet: the roles of a run as processes, started from the zygote, watched and restarted."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.store.ownership import remove_store
from pipelines.inspect.run_state.events import RoleStatus
from pipelines.roles import CANNOT_RUN, Role
from pipelines.run.restarts import Restarts
from pipelines.run.zygote_process import CLOSE_S, ZygoteEnded, ZygoteProcess

EXCUSED_PAUSE_S = 1.0


class RoleFailed(RuntimeError):
    """A role cannot be kept running; the message names its log."""


@dataclass(slots=True)
class FleetMember:
    """A role's process. `wanted` until it is told to stop; `due` is when it is to be started (monotonic seconds).

    A `job` is done when it ends by itself, and wanted no more; `code` then says how.
    """

    role: Role
    job: bool = False
    pid: int | None = None
    restarts: int = 0
    wanted: bool = True
    due: float | None = 0.0
    code: int | None = None
    deaths: Restarts = field(default_factory=Restarts)

    @property
    def status(self) -> RoleStatus:
        if self.pid is not None:
            return "up"
        if self.code is None:
            return "starting"
        return "down" if self.wanted or self.code else "ended"


class Fleet:
    """Starts `Role`s from one zygote. `note` takes one-line news. Call `tend` often.

    `config` is the resolved configuration file, `logs` the folder of logs, `store` the weight store that goes with the
    run, `model` the folder that the zygote gets ready for, if it is known yet. A death while `excused` says yes (Kafka
    is away) does not count among those after which a role is given up.
    """

    def __init__(
        self,
        config: Path,
        logs: Path,
        store: Path,
        note: Callable[[str], None],
        *,
        model: str = "",
        excused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config, self._logs, self._store, self._note = config.absolute(), logs.absolute(), store, note
        self._excused = excused
        self._model = model
        self.members: dict[str, FleetMember] = {}
        self._deaths = Restarts()
        self._zygote = self._new_zygote()

    def add(self, role: Role) -> None:
        """Start `role` and keep it running."""
        self.members[role.name] = FleetMember(role)

    def once(self, name: str) -> None:
        """Start the job `name`."""
        self.members[name] = FleetMember(Role(name), job=True)

    def tend(self, wait_s: float = 0.0) -> None:
        """Take in what happened and start what is due. Raises RoleFailed."""
        try:
            for event in self._zygote.hear(wait_s):
                self._hear(event)
        except ZygoteEnded:
            self._replace_zygote()
        if self._zygote.ready:
            now = time.monotonic()
            for name, member in self.members.items():
                if member.due is not None and member.due <= now:
                    member.due = None
                    self._start(name, member)

    def stop(self, names: Iterable[str], number: int = signal.SIGTERM) -> None:
        """Ask these roles to drain; they are not restarted."""
        for name in names:
            member = self.members[name]
            member.wanted, member.due = False, None
            self._zygote.say({"signal": name, "number": int(number)})

    def running(self) -> list[str]:
        """The roles that have a process."""
        return [name for name, member in self.members.items() if member.pid is not None]

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Stop whatever still runs, and the zygote; what the roles shared is removed."""
        self._zygote.close(timeout_s)
        if self._store.exists():  # of a zygote that was killed
            remove_store(self._store, in_use=True)

    def _hear(self, event: dict[str, Any]) -> None:
        if "started" in event:
            member = self.members[event["started"]]
            member.pid, member.code = event["pid"], None
            return
        name, code = event["ended"], event["code"]
        member = self.members[name]
        member.pid, member.code = None, code
        if member.job and code >= 0:
            member.wanted = False
        if not member.wanted:
            return
        log = self._logs / f"{name}.log"
        if code == CANNOT_RUN:
            raise RoleFailed(f"{name} cannot run: {last_line(log)} (see {log})")
        if self._excused():
            pause: float | None = EXCUSED_PAUSE_S
        else:
            pause = member.deaths.count()
        if pause is None:
            raise RoleFailed(f"{name} died {member.deaths.rate()}, the last time: {last_line(log)} (see {log})")
        member.restarts += 1
        member.due = time.monotonic() + pause
        self._note(f"{name} {_how(code)}; starting it again")

    def _start(self, name: str, member: FleetMember) -> None:
        role = member.role
        self._zygote.say(
            {
                "start": name,
                "pipeline": role.pipeline,
                "index": role.index,
                "config": str(self._config),
                "log": str(self._logs / f"{name}.log"),
            }
        )

    def _new_zygote(self) -> ZygoteProcess:
        return ZygoteProcess(self._logs / "zygote.log", self._model, self._store)

    def _replace_zygote(self) -> None:
        """Start another zygote, and all roles from it: they have died with the last. Raises RoleFailed."""
        log, came_up, code = self._logs / "zygote.log", self._zygote.ready, self._zygote.bury()
        if self._deaths.count() is None or (code >= 0 and not came_up):  # what cannot be imported now cannot be then
            raise RoleFailed(f"the process that starts roles {_how(code)}: {last_line(log)} (see {log})")
        self._note(f"the process that starts roles {_how(code)}, and they with it; starting all again")
        self._zygote = self._new_zygote()
        for member in self.members.values():
            died = member.pid is not None
            if died:
                member.pid, member.code = None, -signal.SIGKILL
            if member.wanted:
                member.restarts += died
                member.due = time.monotonic()


def last_line(log: Path) -> str:
    """The last line that a process has written to its log."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it gave no reason"


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
