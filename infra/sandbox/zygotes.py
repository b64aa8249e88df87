"""The supervisor's side of zygotes: starts one when it is first needed, and again when it has died."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.scratch import remove_left_folders

_ROOT = Path(__file__).parents[2]
# -I: imports depend neither on the supervisor's environment nor on its working folder.
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from infra.sandbox.zygote import main; del sys.path[0]; "
    "main(int(sys.argv[2]), sys.argv[3] == 'True', int(sys.argv[4]))"
)
_START_S = 60.0
_MAX_MESSAGE_BYTES = 4096
NEWEST_ABI = 1000
PROGRAM_FOLDERS = "laminar-sandbox-"
"""Prefix of the working folders of programs where the zygote has no namespaces."""


class SandboxUnavailable(RuntimeError):
    """This machine cannot confine a program; the message says which layer is missing."""


@dataclass(frozen=True)
class Isolation:
    """Which layers a zygote uses. The guarantees are the same with and without namespaces."""

    namespaces: bool = True
    newest_abi: int = NEWEST_ABI
    """The newest ABI of Landlock to use; the kernel's own where that is older."""


class Zygote:
    """A zygote process of this process; it exits when this process does, or closes it."""

    def __init__(self, isolation: Isolation) -> None:
        """Raises SandboxUnavailable if the machine lacks a layer."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = [str(_ROOT), str(theirs.fileno()), str(isolation.namespaces), str(isolation.newest_abi)]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-B", "-c", _BOOT, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"PATH": "", "OMP_NUM_THREADS": "1"},
                cwd="/",
                start_new_session=True,
            )
        self._control.settimeout(_START_S)
        try:
            hello = json.loads(self._control.recv(_MAX_MESSAGE_BYTES) or b'{"refused": "it exited at its start"}')
        except TimeoutError:
            hello = {"refused": f"it did not start within {_START_S:g} s"}
        if "refused" in hello:
            self.close()
            raise SandboxUnavailable(f"this machine cannot confine a program: {hello['refused']}")
        self.namespaces, self.abi = bool(hello["namespaces"]), int(hello["abi"])
        if not self.namespaces:
            remove_left_folders(PROGRAM_FOLDERS)

    def fork(self, job: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Fork a child for `job` with these descriptors. Raises OSError if the zygote has died."""
        socket.send_fds(self._control, [json.dumps(job).encode()], list(descriptors))

    def close(self) -> None:
        """Kill the zygote and all its programs."""
        self._control.close()
        self._process.kill()
        self._process.wait()


class Zygotes:
    """The zygotes of this process: one for each isolation requested. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._running: dict[Isolation, Zygote] = {}

    def get(self, isolation: Isolation | None = None) -> Zygote:
        """The zygote with this isolation; by default with namespaces where this machine permits them.

        Raises SandboxUnavailable.
        """
        with self._lock:
            if self._owner != os.getpid():  # forked: the zygotes are those of the parent
                self._owner, self._running = os.getpid(), {}
            wanted = isolation or Isolation()
            if wanted not in self._running:
                self._running[wanted] = Zygote(wanted) if isolation else _strongest_zygote()
            return self._running[wanted]

    def replace(self, dead: Zygote) -> None:
        """Remove a zygote that has died: the next `get` starts another."""
        with self._lock:
            for isolation in [isolation for isolation, zygote in self._running.items() if zygote is dead]:
                self._running.pop(isolation).close()

    def close(self) -> None:
        """Kill the zygotes of this process and all their programs; the next `get` starts one again."""
        with self._lock:
            mine, self._running = self._running if self._owner == os.getpid() else {}, {}
        for zygote in mine.values():
            zygote.close()


def _strongest_zygote() -> Zygote:
    try:
        return Zygote(Isolation(namespaces=True))
    except SandboxUnavailable:
        return Zygote(Isolation(namespaces=False))


ZYGOTES = Zygotes()
