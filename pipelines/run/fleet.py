"""The fleet: the processes of a run's roles, forked from the zygote, monitored and restarted."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.processes import last_line
from infra.store.ownership import remove_store
from pipelines.inspect.run_files import ZYGOTE_LOG
from pipelines.inspect.run_state.events import RoleStatus
from pipelines.roles import CANNOT_RUN, RoleProcess
from pipelines.run.restarts import Restarts, exit_text
from pipelines.run.zygote_process import CLOSE_S, ZygoteEnded, ZygoteProcess

EXCUSED_PAUSE_S = 1.0


class RoleFailed(RuntimeError):
    """A role cannot be started or dies too often. The message names its log."""


@dataclass(slots=True)
class FleetMember:
    """A process and its state. `wanted`: not yet stopped; `due`: when to start it next (monotonic seconds).

    A `job` that ends by itself is done: it is no longer wanted, and `code` is its exit code.
    """

    process: RoleProcess
    job: bool = False
    pid: int | None = None
    restarts: int = 0
    wanted: bool = True
    due: float | None = 0.0
    code: int | None = None
    config: Path | None = None
    """The configuration of a job; None: that of the fleet."""
    alive: bool = False
    """Whether the zygote was asked to start it, and it has not ended since."""
    deaths: Restarts = field(default_factory=Restarts)

    @property
    def status(self) -> RoleStatus:
        if self.pid is not None:
            return "up"
        if self.code is None:
            return "starting"
        return "down" if self.wanted or self.code else "ended"


class Fleet:
    """Starts the processes of roles from one zygote. `note` receives one-line messages. Call `poll` often.

    `config` is the resolved configuration file, `logs` the folder of logs, `store` the run's weight store, which is
    removed at the end, `model` the model folder whose code the zygote imports, if known. Deaths while `excused` is true
    (Kafka is unavailable) do not count towards the restart limit.
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
        self._zygote_deaths = Restarts()
        self._zygote = self._new_zygote()

    def add(self, process: RoleProcess) -> None:
        """Start `process` and keep it running."""
        self.members[process.name] = FleetMember(process)

    def run_job(self, name: str, config: Path | None = None) -> None:
        """Start the job `name`, which is not restarted, with `config` or the configuration of the fleet.

        The zygote starts it when it is ready, without a `poll`.
        """
        self.members[name] = FleetMember(RoleProcess(name, ()), job=True, due=None, config=config)
        self._start(name, self.members[name])

    def poll(self, wait_s: float = 0.0) -> None:
        """Handle events of the zygote and start the roles that are due. Raises RoleFailed."""
        try:
            for event in self._zygote.receive(wait_s):
                self._handle(event)
        except ZygoteEnded:
            self._replace_zygote()
        if self._zygote.ready:
            now = time.monotonic()
            for name, member in self.members.items():
                if member.due is not None and member.due <= now:
                    member.due = None
                    self._start(name, member)

    def stop(self, names: Iterable[str], signal_number: int = signal.SIGTERM) -> None:
        """Send a signal to these roles, by default SIGTERM: they drain and are not restarted."""
        for name in names:
            member = self.members[name]
            member.wanted, member.due = False, None
            self._zygote.send({"signal": name, "number": int(signal_number)})

    def running(self) -> list[str]:
        """The names of the roles that have a process."""
        return [name for name, member in self.members.items() if member.pid is not None]

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Stop all roles and the zygote; remove the weight store."""
        self._zygote.close(timeout_s)
        if self._store.exists():  # the zygote was killed before it could remove it
            remove_store(self._store, in_use=True)

    def _handle(self, event: dict[str, Any]) -> None:
        if "started" in event:
            member = self.members[event["started"]]
            member.pid, member.code = event["pid"], None
            return
        name, code = event["ended"], event["code"]
        member = self.members[name]
        member.pid, member.code, member.alive = None, code, False
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
            pause = member.deaths.record_death()
        if pause is None:
            raise RoleFailed(f"{name} died {member.deaths.rate()}; last error: {last_line(log)} (see {log})")
        member.restarts += 1
        member.due = time.monotonic() + pause
        self._note(f"{name} {exit_text(code)}; restarting it")

    def _start(self, name: str, member: FleetMember) -> None:
        member.alive = True
        self._zygote.send(
            {
                "start": name,
                "roles": [(role.pipeline, role.index) for role in member.process.roles],
                "config": str((member.config or self._config).absolute()),
                "log": str(self._logs / f"{name}.log"),
            }
        )

    def _new_zygote(self) -> ZygoteProcess:
        return ZygoteProcess(self._logs / ZYGOTE_LOG, self._model, self._store)

    def _replace_zygote(self) -> None:
        """Start a new zygote and restart all roles, which died with the old one. Raises RoleFailed."""
        log, was_ready, code = self._logs / ZYGOTE_LOG, self._zygote.ready, self._zygote.reap()
        if self._zygote_deaths.record_death() is None or (code >= 0 and not was_ready):  # an import error would repeat
            raise RoleFailed(
                f"the zygote process, which starts the roles, {exit_text(code)}: {last_line(log)} (see {log})"
            )
        self._note(f"the zygote process {exit_text(code)}, and all roles with it; restarting all of them")
        self._zygote = self._new_zygote()
        for member in self.members.values():
            died, member.alive = member.pid is not None, False
            if died:
                member.pid, member.code = None, -signal.SIGKILL
            if member.wanted:
                member.restarts += died
                member.due = time.monotonic()
