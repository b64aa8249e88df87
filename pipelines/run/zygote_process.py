"""The zygote as its fleet has it: a process that takes commands and tells events, and that others go with."""

from __future__ import annotations

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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from infra.processes import is_running

CLOSE_S = 5.0
"""How long a zygote may take to end: a second longer than its roles may."""
_LOOK_S = 0.02


class ZygoteEnded(Exception):
    """It is gone, or about to be: `bury` says how."""


class ZygoteProcess:
    """A zygote, started at once; it guards `store` and gets ready for `model`, see zygote.py.

    Its roles have a temporary directory of their own, removed with it: roles that are killed leave things there.

    `ready` once it has imported everything; what it is told before is heeded then.
    """

    def __init__(self, log: Path, model: str, store: Path) -> None:
        self.ready = False
        self._buffer = b""
        self._scratch = temporary_folder(log.parent)
        self._process = start_zygote(log, model)
        self.say({"guard": str(store), "scratch": self._scratch})

    def say(self, command: Mapping[str, Any]) -> None:
        """Tell it something; whether it has ended shows in `hear`."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def hear(self, wait_s: float) -> list[dict[str, Any]]:
        """What it has told since, of its roles. Raises ZygoteEnded."""
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
        """End it, and what it has started with it."""
        self._close_input()
        try:
            if not self.ready:
                self._process.kill()  # it has no roles yet, and would not look up before its imports are done
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its roles die with it
            self._process.wait()
        self._close_output()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def bury(self) -> int:
        """Wait until nothing is left of one that has ended: its exit code, negative for a signal.

        Its roles die with it by the kernel's hand, if not at once; here it is made sure of. They are found by their
        session, which is its own; its number is given to nobody before it has been waited for.
        """
        self._close_input()
        while left := list(_session_of(self._process.pid)):
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            time.sleep(_LOOK_S)
        try:
            code = self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._close_output()
        shutil.rmtree(self._scratch, ignore_errors=True)
        return code

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _close_output(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()


def temporary_folder(logs: Path) -> str:
    """A new temporary directory for the run with the folder `logs`; what an earlier process left there is removed.

    Its name follows from the run's, so a run that was killed whole, and is resumed, cleans up behind itself.
    """
    folder = temporary_place(logs)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:  # another user's
        return tempfile.mkdtemp(prefix="laminar-run-")
    return folder


def temporary_place(logs: Path) -> str:
    """Where `temporary_folder` makes it."""
    name = hashlib.sha256(str(logs.absolute()).encode()).hexdigest()[:12]
    return os.path.join(tempfile.gettempdir(), f"laminar-run-{name}")


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


def _session_of(leader: int) -> Iterator[psutil.Process]:
    """The processes in the session of `leader` that live, but for itself."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if process.pid != leader and os.getsid(process.pid) == leader and is_running(process):
                yield process
