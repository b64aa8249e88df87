"""Run Python that nobody has read, written by a model say, and have it back in bounded time and space.

The program runs in a process of its own (see confine.py for the walls around it), in an empty folder of its own, with
nothing of this process's environment. Linux 5.13 or later; elsewhere SandboxUnavailable.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infra.sandbox import confine

_MIB = 1024 * 1024
_LOOK_EVERY_S = 0.05
"""How often the folder's size is looked at."""
_START_S = 60.0
"""How long Python may take to start, which is no fault of the program's."""
_PIPE_BYTES = 65_536

Ending = Literal["exited", "killed", "time", "output", "disk"]


class SandboxUnavailable(RuntimeError):
    """This machine cannot confine a program; the message says which wall is missing."""


@dataclass(frozen=True)
class Limits:
    """What a program may use up: seconds by the clock from its start, MiB of address space and of files."""

    seconds: float = 4.0
    memory_mb: int = 512
    disk_mb: int = 16
    output_bytes: int = 65_536
    """Of standard output and error together."""

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mb", "disk_mb", "output_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


@dataclass(frozen=True)
class Ran:
    """What became of a program: how it ended, its exit status (minus a signal's number), what it wrote, its seconds."""

    ended: Ending
    status: int
    output: bytes
    errors: bytes
    seconds: float


def run_python(program: str, given: bytes = b"", limits: Limits | None = None) -> Ran:
    """Run `program` with `given` on its standard input, and wait until nothing of it is left.

    Raises SandboxUnavailable where it cannot be confined; nothing for whatever the program does.
    """
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="laminar-sandbox-", ignore_cleanup_errors=True) as folder:
        ran = _Running(program, given, limits, Path(folder)).wait()
    if ran.ended == "exited" and ran.status == confine.REFUSED:
        raise SandboxUnavailable(ran.errors.decode(errors="replace").strip())
    return ran


class _Running:
    """A program at work: its process leads a group of its own, and is killed with it."""

    def __init__(self, program: str, given: bytes, limits: Limits, folder: Path) -> None:
        self._limits, self._folder = limits, folder
        self._started = time.monotonic()
        job, job_end = os.pipe()
        self._ready, ready_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                # -I: neither this process's environment nor its folder say what is imported.
                [sys.executable, "-I", "-B", confine.__file__, str(os.getpid()), str(job), str(ready_end)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[job, ready_end],
                cwd=folder,
                env={"PATH": "", "HOME": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        finally:
            os.close(job)
            os.close(ready_end)
        self._selector = selectors.DefaultSelector()
        self._read: dict[int, bytearray] = {}
        self._selector.register(self._ready, selectors.EVENT_READ)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            self._read[stream.fileno()] = bytearray()
            self._selector.register(stream.fileno(), selectors.EVENT_READ)
        assert self._process.stdin is not None
        self._send(os.dup(self._process.stdin.fileno()), given)
        self._process.stdin.close()
        self._send(job_end, json.dumps({"program": program, "limits": _rlimits(limits)}).encode())

    def wait(self) -> Ran:
        """Until it ends, or has to."""
        try:
            ended = self._watch()
        finally:
            self._end()
        status = self._process.returncode
        output, errors = (bytes(each[: self._limits.output_bytes]) for each in self._read.values())
        if ended == "exited" and status < 0:
            ended = "time" if -status == signal.SIGXCPU else "killed"
        return Ran(ended, status, output, errors, time.monotonic() - self._started)

    def _watch(self) -> Ending:
        deadline = self._started + _START_S
        while (now := time.monotonic()) < deadline:
            for key, events in self._selector.select(min(_LOOK_EVERY_S, deadline - now)):
                if key.fd == self._ready:  # closed: from now on its time is the program's
                    self._selector.unregister(key.fd)
                    self._started = time.monotonic()
                    deadline = self._started + self._limits.seconds
                else:
                    (self._take if events & selectors.EVENT_READ else self._give)(key)
            if sum(map(len, self._read.values())) > self._limits.output_bytes:
                return "output"
            if _bytes_in(self._folder) > self._limits.disk_mb * _MIB:
                return "disk"
            # A thread of its own cannot outlive it, and what it had started cannot exist: no pipe is left open.
            if self._process.poll() is not None and not any(fd in self._selector.get_map() for fd in self._read):
                return "exited"
        return "time"

    def _send(self, descriptor: int, what: bytes) -> None:
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_WRITE, memoryview(what))

    def _give(self, key: selectors.SelectorKey) -> None:
        """Write what there is room for; close the pipe at the end of it, or where nobody reads."""
        rest: memoryview = key.data
        try:
            rest = rest[os.write(key.fd, rest[:_PIPE_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            rest = rest[:0]
        self._selector.unregister(key.fd)
        if rest:
            self._selector.register(key.fd, selectors.EVENT_WRITE, rest)
        else:
            os.close(key.fd)

    def _take(self, key: selectors.SelectorKey) -> None:
        part = os.read(key.fd, _PIPE_BYTES)
        self._read[key.fd] += part
        if not part:
            self._selector.unregister(key.fd)

    def _end(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # its group's id is not given away before wait()
        except (ProcessLookupError, PermissionError):
            self._process.kill()
        self._process.wait()
        for key in list(self._selector.get_map().values()):
            if key.events & selectors.EVENT_WRITE:
                os.close(key.fd)
        os.close(self._ready)
        self._selector.close()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def _rlimits(limits: Limits) -> dict[str, int]:
    return {
        "AS": limits.memory_mb * _MIB,
        "CPU": math.ceil(limits.seconds) + 1,  # the last resort: the clock is looked at from outside
        "FSIZE": limits.disk_mb * _MIB // 2,  # an error of its own, before the end that all files together meet
        "NOFILE": 64,
        "CORE": 0,
    }


def _bytes_in(folder: Path) -> int:
    """What the files in `folder` take up, a block for each name at the least. It can have no folders in it."""
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # gone since
                total += 4096 + entry.stat(follow_symlinks=False).st_size
    return total
