"""A running program as seen by its supervisor: its input and output, limits and end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infra.sandbox.cgroups import ProgramCgroup, program_cgroup
from infra.sandbox.zygotes import SandboxUnavailable, Zygote

_BLOCK = 512
_NAME = 4096
"""Minimum of bytes counted for a directory entry."""
_THREADS = re.compile(rb"^Threads:\t(\d+)$", re.MULTILINE)
_GONE = (FileNotFoundError, ProcessLookupError)


def thread_count(pid: int) -> int:
    """The number of threads of a process; 0 if it has ended."""
    found = _THREADS.search(_status(pid))
    return int(found.group(1)) if found else 0


def disk_bytes(folder: str, pid: int, max_file_bytes: int) -> int:
    """Disk bytes of the program's files in `folder`, which has no subfolders, unlinked files included.

    Blocks count, not sizes. An unlinked file counts while the program has it open; one that is only mapped, whose
    blocks cannot be read, counts as `max_file_bytes`, the maximum of a file. Raises PermissionError if the kernel does
    not let this user inspect the running process.
    """
    files = dict(_files_named(folder))
    total = _NAME * len(files)
    try:
        files.update(_files_open(pid))
        with open(f"/proc/{pid}/maps", "rb") as maps:
            deleted = re.findall(rb"(\d+) +" + re.escape(os.fsencode(folder)) + rb"/.* \(deleted\)\n", maps.read())
    except _GONE:
        deleted = []
    except PermissionError:
        if b"\nVmSize:" in _status(pid):  # a zombie's files belong to root
            raise
        deleted = []
    known = {inode for _, inode in files}
    return total + sum(files.values()) + max_file_bytes * len(set(map(int, deleted)) - known)


def _files_named(folder: str) -> Iterator[tuple[tuple[int, int], int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                state = entry.stat(follow_symlinks=False)
                yield (state.st_dev, state.st_ino), state.st_blocks * _BLOCK


def _files_open(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Open files that are unlinked."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(*_GONE):
            state = os.stat(f"/proc/{pid}/fd/{name}")
            if state.st_nlink == 0:
                yield (state.st_dev, state.st_ino), state.st_blocks * _BLOCK


def _status(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            return status.read()
    except _GONE:
        return b""


_MIB = 1024 * 1024
_MAX_MEMORY_MB, _MAX_SECONDS = 1 << 40, 1 << 30
"""More is no limit, and the kernel takes no larger numbers."""
_MONITOR_MB = 64
"""Memory of a cgroup for the monitor and the kernel."""
MEASURE_EVERY_S = 0.02
"""Seconds between measurements of a program's resource use."""
_START_S = 60.0
"""Time limit of a start; the program's own time starts after it."""
_PIPE_BYTES = 65_536
_MAX_MESSAGE_BYTES = 4096

ProgramEnding = Literal["exited", "killed", "time", "output", "disk", "threads"]


class ZygoteDied(Exception):
    """The program's monitor was killed, and the program with it, before it ended by itself."""


@dataclass(frozen=True)
class Limits:
    """Resource limits of a program: wall-clock seconds from its start, MiB of address space and of files."""

    seconds: float = 4.0
    memory_mb: int = 512
    disk_mb: int = 16
    output_bytes: int = 65_536
    """Limit of standard output and error together."""
    threads: int = 64

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mb", "disk_mb", "output_bytes", "threads"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


@dataclass(frozen=True)
class ProgramResult:
    """The result of a program: how it ended, exit status (negative: signal number), output, and seconds."""

    ended: ProgramEnding
    status: int
    output: bytes
    errors: bytes
    seconds: float


class Running:
    """One program. Call `step` until it returns how the program ended, then `close` in any case."""

    def __init__(
        self, zygote: Zygote, folder: str, program: str, stdin: bytes, limits: Limits, channel: Sequence[int] = ()
    ) -> None:
        """Start `program` with `stdin` on its standard input and the descriptors `channel` as 3, 4, ...

        `folder` is where it writes if the zygote has no namespaces. Raises ZygoteDied.
        """
        self._limits, self._folder = limits, None if zygote.namespaces else folder
        self._started = time.monotonic()
        self._deadline = self._started + _START_S
        self._next_measurement = 0.0
        self._pid: int | None = None
        self._cgroup: ProgramCgroup | None = None
        self._ready = False
        self._ended: dict[str, Any] | None = None
        self._read: dict[int, bytearray] = {}
        self._selector = selectors.EpollSelector()
        self._status, monitor_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pipes = [os.pipe() for _ in range(4)]
        (job, job_end), (standard_input, input_end), (output_end, output), (errors_end, errors) = pipes
        self._selector.register(self._status, selectors.EVENT_READ)
        for end in (output_end, errors_end):
            self._read[end] = bytearray()
            self._selector.register(end, selectors.EVENT_READ)
        self._send(job_end, json.dumps(program).encode())
        self._send(input_end, stdin)
        request: dict[str, Any] = {
            "limits": _rlimits(limits, zygote.namespaces),
            "disk_bytes": limits.disk_mb * _MIB,
            "folder": folder,
        }
        passed = [monitor_end.fileno(), job, standard_input, output, errors, *channel]
        try:
            try:
                others = (limits.disk_mb + _MONITOR_MB) * _MIB
                self._cgroup = program_cgroup(_memory_bytes(limits) + others, limits.threads)
                if self._cgroup:
                    request["cgroup"] = True
                    passed.append(self._cgroup.joining)
                zygote.fork(request, passed)
            finally:
                monitor_end.close()
                for each in (job, standard_input, output, errors):
                    os.close(each)
        except SandboxUnavailable:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise ZygoteDied from error

    def fileno(self) -> int:
        """A descriptor that is readable when `step` has something to do."""
        return self._selector.fileno()

    def step(self, timeout: float) -> ProgramEnding | None:
        """Transfer input and output and check the limits; returns how the program ended, or None while it runs.

        Raises ZygoteDied, and SandboxUnavailable where it could not be confined.
        """
        for key, events in self._selector.select(timeout):
            if key.fileobj is self._status:
                self._receive_status()
            elif events & selectors.EVENT_READ:
                self._read_output(key)
            else:
                self._write_input(key)
        if sum(map(len, self._read.values())) > self._limits.output_bytes:
            return "output"
        if self._ended is not None:
            still_open = any(end in self._selector.get_map() for end in self._read)
            return None if still_open else self._ending_of(self._ended)
        now = time.monotonic()
        if now >= self._deadline:
            return "time"
        if self._pid is None or now < self._next_measurement:
            return None
        self._next_measurement = now + MEASURE_EVERY_S
        return self._exceeded_limit(self._pid)

    def result(self, ended: ProgramEnding) -> ProgramResult:
        """The program's result, after `close`."""
        status = self._ended["ended"] if self._ended else -signal.SIGKILL
        output, errors = (bytes(each[: self._limits.output_bytes]) for each in self._read.values())
        return ProgramResult(ended, status, output, errors, time.monotonic() - self._started)

    def close(self) -> None:
        """Kill the program if it has not ended, and wait until all its resources are released. May be called again."""
        if self._status.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._status.shutdown(socket.SHUT_WR)  # the monitor kills it
        self._status.settimeout(_START_S)
        with contextlib.suppress(ConnectionError, SandboxUnavailable):
            while message := self._status.recv(_MAX_MESSAGE_BYTES):
                self._record(json.loads(message))
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._status:
                os.close(key.fd)
        self._selector.close()
        self._status.close()
        if self._cgroup:
            self._cgroup.close()

    def _receive_status(self) -> None:
        try:
            message = self._status.recv(_MAX_MESSAGE_BYTES)
        except ConnectionError:
            message = b""
        if message:
            self._record(json.loads(message))
            return
        self._selector.unregister(self._status)
        if self._ended is None:
            raise ZygoteDied

    def _record(self, message: dict[str, Any]) -> None:
        if "refused" in message:
            raise SandboxUnavailable(f"this machine cannot confine a program: {message['refused']}")
        if "pid" in message:
            self._pid = message["pid"]
        if "ended" in message:
            self._ended = message
        if "ready" in message:  # the program's time starts
            self._ready = True
            self._started = time.monotonic()
            self._deadline = self._started + self._limits.seconds

    def _ending_of(self, ended: dict[str, Any]) -> ProgramEnding:
        status = ended["ended"]
        if status == 0:
            return "exited"
        if ended["full"]:
            return "disk"
        if status > 0:
            return "exited"
        return "time" if -status in (signal.SIGXCPU, signal.SIGKILL) and self._cpu_limit_reached() else "killed"

    def _exceeded_limit(self, pid: int) -> ProgramEnding | None:
        if thread_count(pid) > self._limits.threads:
            return "threads"
        if self._folder is None:
            return None
        max_file_bytes = _max_file_bytes(self._limits)
        return "disk" if disk_bytes(self._folder, pid, max_file_bytes) > self._limits.disk_mb * _MIB else None

    def _cpu_limit_reached(self) -> bool:
        """Whether it ran long enough to reach the limit of CPU time, at which the kernel kills it."""
        return time.monotonic() - self._started >= self._limits.seconds

    def _send(self, descriptor: int, what: bytes) -> None:
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_WRITE, memoryview(what))

    def _write_input(self, key: selectors.SelectorKey) -> None:
        """Write what the pipe accepts; close it at the end of the input, or if it has no reader."""
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

    def _read_output(self, key: selectors.SelectorKey) -> None:
        part = os.read(key.fd, _PIPE_BYTES)
        self._read[key.fd] += part
        if not part:
            self._selector.unregister(key.fd)
            os.close(key.fd)


def _rlimits(limits: Limits, namespaces: bool) -> dict[str, int]:
    own = {
        "AS": _memory_bytes(limits),
        "CPU": math.ceil(min(limits.seconds, _MAX_SECONDS)) + 1,  # the last resort: the supervisor has a clock
        "FSIZE": _max_file_bytes(limits),  # an error in the program, before all files together reach their limit
        "NOFILE": 64,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "CORE": 1,  # too little for a file, and the one value for which the kernel starts no program with the dump
    }
    # The kernel counts processes of a user: without a namespace those of the whole machine.
    return own | ({"NPROC": limits.threads + 1} if namespaces else {})


def _memory_bytes(limits: Limits) -> int:
    return int(min(limits.memory_mb, _MAX_MEMORY_MB) * _MIB)


def _max_file_bytes(limits: Limits) -> int:
    return limits.disk_mb * _MIB // 2
