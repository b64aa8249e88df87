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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.roles import Role

RESTARTS_WITHIN_S = 60.0
MOST_RESTARTS = 6
"""A role that dies more often than so within `RESTARTS_WITHIN_S` seconds ends the run."""


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
    deaths: tuple[float, ...] = ()


class Fleet:
    """Starts `Role`s from one zygote. `note` takes one-line news. Call `tend` often.

    `config` is the resolved configuration file, `logs` the folder of logs, `store` the weight store that goes with the run.
    """

    def __init__(self, config: Path, logs: Path, store: Path, note: Callable[[str], None]) -> None:
        self._config, self._logs, self._store, self._note = config, logs, store, note
        self.members: dict[str, Member] = {}
        self._buffer = b""
        self.ready = False
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (logs / "zygote.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipelines.run.zygote"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is the supervisor's to handle
            )

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
                raise RoleFailed(f"the process that starts roles has ended: see {self._logs / 'zygote.log'}")
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

    def close(self, timeout_s: float = 6.0) -> None:
        """Stop whatever still runs, and the zygote; what the roles shared is removed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its roles die with it
            self._process.wait()
        self._process.stdout.close()

    def _hear(self, event: dict[str, Any]) -> None:
        if "ready" in event:
            self.ready = True
            return
        if "started" in event:
            member = self.members[event["started"]]
            member.pid, member.code = event["pid"], None
            return
        member = self.members[event["ended"]]
        member.pid, member.code = None, event["code"]
        if not member.wanted:
            return
        name, log = event["ended"], self._logs / f"{event['ended']}.log"
        if event["code"] == 2:
            raise RoleFailed(f"{name} cannot run: {_last_line(log)} (see {log})")
        now = time.monotonic()
        member.deaths = (*(death for death in member.deaths if now - death < RESTARTS_WITHIN_S), now)
        if len(member.deaths) > MOST_RESTARTS:
            raise RoleFailed(f"{name} died {len(member.deaths)} times in {RESTARTS_WITHIN_S:.0f} s: see {log}")
        member.restarts += 1
        member.due = now + 0.1 * 2 ** min(len(member.deaths) - 1, 6)
        self._note(f"{name} {_how(event['code'])}; starting it again")

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
            raise RoleFailed(f"the process that starts roles has ended: see {self._logs / 'zygote.log'}") from error


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no reason given"
