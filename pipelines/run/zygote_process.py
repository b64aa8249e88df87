"""The zygote as a subprocess of its fleet, which sends it commands and receives its events."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from infra.processes import is_locked, is_running

CLOSE_S = 5.0
"""How long a zygote may take to end: longer than zygote.GRACE_S."""
FORMER_S = 60.0
"""How long the zygote of a killed run may take to end: it may still import."""
_CHECK_EVERY_S = 0.02


class ZygoteEnded(Exception):
    """The zygote has ended; `reap` returns its exit code."""


class ZygoteProcess:
    """Starts a zygote, which imports the code of `model` and removes `store` at its end, see zygote.py.

    Its roles share a temporary folder, which is removed with it, because killed roles leave files there.

    `ready` is true once it has imported all modules; it executes earlier commands then.
    """

    def __init__(self, log: Path, model: str, store: Path) -> None:
        self.ready = False
        self._buffer = b""
        self._temporary_folder = temporary_folder(log.parent)
        with log.open("ab") as file:
            with suppress(OSError):  # of a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._process = start_zygote(file, model)
        self.send({"store": str(store), "temporary_folder": self._temporary_folder})

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command. If the zygote has ended, `receive` raises."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, wait_s: float) -> list[dict[str, Any]]:
        """The new events of its roles; waits up to `wait_s` seconds for one. Raises ZygoteEnded."""
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], wait_s)[0]:
            return []
        data = os.read(output.fileno(), 65536)
        if not data:
            raise ZygoteEnded
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        events = [json.loads(line) for line in lines]
        self.ready = self.ready or any("ready" in event for event in events)
        return [event for event in events if "ready" not in event]

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Stop it, and its roles with it."""
        self._close_input()
        if not self.ready:
            self._process.kill()  # it has no roles yet, and does not read its input before its imports are done
        self._end(timeout_s)

    def reap(self) -> int:
        """Wait until an ended zygote and its roles are gone. Returns its exit code, negative for a signal.

        The kernel kills its roles, possibly later; this kills those that are left. They are in the zygote's session,
        whose id cannot be reused before the zygote is waited for.
        """
        self._close_input()
        while left := list(_session_of(self._process.pid)):
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            time.sleep(_CHECK_EVERY_S)
        return self._end(CLOSE_S)

    def _end(self, timeout_s: float) -> int:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its roles die with it
            code = self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        shutil.rmtree(self._temporary_folder, ignore_errors=True)
        return code

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()


def temporary_folder(logs: Path) -> str:
    """Create an empty temporary folder for the run with the log folder `logs`, or for the role with that log.

    Its name follows from that path, so a resumed run removes what its killed processes left there.
    """
    folder = temporary_path(logs)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:  # it belongs to another user
        return tempfile.mkdtemp(prefix="laminar-run-")
    return folder


def temporary_path(logs: Path) -> str:
    """The path that `temporary_folder` uses."""
    name = hashlib.sha256(str(logs.absolute()).encode()).hexdigest()[:12]
    return os.path.join(tempfile.gettempdir(), f"laminar-run-{name}")


def start_zygote(log: IO[bytes], model: str) -> subprocess.Popen[bytes]:
    """Start a zygote with pipes for standard input and output. It imports for some seconds before it answers."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pipelines.run.zygote", model],  # -P: the module path of the command `laminar`
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        start_new_session=True,  # the supervisor handles Ctrl-C
    )


def wait_for_zygote(log: Path, check: Callable[[], None], seconds: float = FORMER_S) -> bool:
    """Wait until the zygote that writes to `log` has ended, and return whether it has; `check` is called meanwhile.

    One whose supervisor was killed removes the run's store and temporary folder at its end, so another may not start
    before.
    """
    deadline = time.monotonic() + seconds
    while is_locked(log):
        if time.monotonic() > deadline:
            return False
        check()
        time.sleep(_CHECK_EVERY_S)
    return True


def _session_of(leader: int) -> Iterator[psutil.Process]:
    """The live processes in the session of `leader`, without `leader`."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if process.pid != leader and os.getsid(process.pid) == leader and is_running(process):
                yield process
