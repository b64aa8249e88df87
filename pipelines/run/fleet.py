"""The fleet: the roles of a run as processes, started from the zygote, watched and restarted."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.store.ownership import remove_store
from pipelines.roles import CANNOT_RUN, Role
from pipelines.run.restarts import Restarts
from pipelines.view.events import RoleStatus

CLOSE_S = 5.0
"""How long the zygote may take to end: a second longer than its roles may."""
EXCUSED_PAUSE_S = 1.0


class RoleFailed(RuntimeError):
    """A role cannot be kept running; the message names its log."""


@dataclass(slots=True)
class Member:
    """A role's process. `wanted` until it is told to stop; `due` is when it is to be started (monotonic seconds)."""

    role: Role
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
        self.members: dict[str, Member] = {}
        self._buffer = b""
        self.ready = False
        self._process = start_zygote(self._logs / "zygote.log", model)

    def add(self, role: Role) -> None:
        """Start `role` and keep it running."""
        self.members[role.name] = Member(role)

    def once(self, name: str) -> None:
        """Start the job `name`, which ends by itself; its member's `code` then says how."""
        self.members[name] = Member(Role(name), wanted=False)

    def tend(self, wait_s: float = 0.0) -> None:
        """Take in what happened and start what is due. Raises RoleFailed."""
        output = self._process.stdout
        assert output is not None
        if select.select([output], [], [], wait_s)[0]:
            data = os.read(output.fileno(), 65536)
            if not data:
                raise RoleFailed(self._no_zygote())
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))
        if self.ready:
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
            self._say({"signal": name, "number": int(number)})

    def running(self) -> list[str]:
        """The roles that have a process."""
        return [name for name, member in self.members.items() if member.pid is not None]

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Stop whatever still runs, and the zygote; what the roles shared is removed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            if not self.ready:
                self._process.kill()  # it has no roles yet, and would not look up before its imports are done
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its roles die with it
            self._process.wait()
        self._process.stdout.close()
        if self._store.exists():  # of a zygote that was killed
            remove_store(self._store, in_use=True)

    def _hear(self, event: dict[str, Any]) -> None:
        if "ready" in event:
            self.ready = True
            return
        if "started" in event:
            member = self.members[event["started"]]
            member.pid, member.code = event["pid"], None
            return
        name, code = event["ended"], event["code"]
        member = self.members[name]
        member.pid, member.code = None, code
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

    def _start(self, name: str, member: Member) -> None:
        role = member.role
        self._say(
            {
                "start": name,
                "pipeline": role.pipeline,
                "index": role.index,
                "config": str(self._config),
                "log": str(self._logs / f"{name}.log"),
                "store": str(self._store),
            }
        )

    def _say(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise RoleFailed(self._no_zygote()) from error

    def _no_zygote(self) -> str:
        log = self._logs / "zygote.log"
        return f"the process that starts roles has ended: {last_line(log)} (see {log})"


def start_zygote(log_file: Path, model: str) -> subprocess.Popen[bytes]:
    """The zygote, its ends of both pipes ours to use; it imports for some seconds before it answers."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log_file.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "pipelines.run.zygote", model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            start_new_session=True,  # Ctrl-C is the supervisor's to handle
        )


def last_line(log: Path) -> str:
    """The last line that a process has written to its log."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it gave no reason"


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
