"""Resource limits of a worker process, applied from inside it.

The limits are rlimits on address space, CPU, file size, descriptors and processes, and an audit hook against forks by
root, which rlimits do not limit. They contain mistakes; they are not a sandbox against malicious code (see
infra/sandbox).
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

OWN_FOLDERS = tuple(str(Path(__file__).parents[2] / name) for name in ("infra", "operators", "pipelines", "schemas"))
"""The folders of Laminar's code: a place there says nothing to the author of a reward or an environment."""
_MAX_ERROR_CHARACTERS = 500
_FILE_BYTES = 16 * 1024 * 1024
_DESCRIPTORS = 256
_PR_SET_PDEATHSIG = 1
_STARTS_PROCESSES = frozenset(
    {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "subprocess.Popen"}
)


def die_with(parent: int) -> None:
    """End this process when `parent` ends for any reason (Linux; elsewhere when the request channel closes)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl
        os._exit(0)


def limit_memory_and_files(memory_limit_mb: int, setting: str) -> None:
    """Limit address space, file sizes and descriptors, and disable core files.

    Raises ValueError naming `setting` if this process has as much address space already: calls would fail at random.
    """
    if (used := _address_space_mb()) >= memory_limit_mb:
        least = f"a process that has loaded no code of yours has {used} MiB of address space"
        raise ValueError(f"{setting} = {memory_limit_mb} is too small: {least}")
    lower_limit(resource.RLIMIT_AS, memory_limit_mb * 1024 * 1024)
    lower_limit(resource.RLIMIT_FSIZE, _FILE_BYTES)
    lower_limit(resource.RLIMIT_NOFILE, _DESCRIPTORS)
    lower_limit(resource.RLIMIT_CORE, 0)


def _address_space_mb() -> int:
    """The present address space of this process in MiB (Linux; elsewhere 0)."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() >> 20


def limit_cpu(seconds: float) -> None:
    """Limit the CPU time from now on: the last resort if the pool itself cannot act."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime + seconds) + 1, hard))


def lower_limit(which: int, value: int) -> None:
    """Set the soft and hard limit, at most to the current hard limit."""
    _, hard = resource.getrlimit(which)
    value = min(value, sys.maxsize if hard == resource.RLIM_INFINITY else hard)
    resource.setrlimit(which, (value, value))


def forbid_processes() -> None:
    """Make starting a process an error, permanently: an audit hook cannot be removed."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS_PROCESSES:
            raise PermissionError("a worker must not start processes: set allow_processes = true to permit it")

    sys.addaudithook(refuse)
    lower_limit(resource.RLIMIT_NPROC, 0)


def describe_error(error: BaseException) -> str:
    """`error` in one line: its class, message, and file and line, unless Laminar itself raised it."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        place = "" if file.startswith(OWN_FOLDERS) else f" ({os.path.basename(file)}:{trace.tb_lineno})"
        trace = trace.tb_next
    try:
        message = str(error)
    except Exception as second:  # noqa: BLE001 - an exception's own __str__ may raise
        message = f"its message cannot be read: {type(second).__name__}"
    message = message.encode("ascii", "backslashreplace").decode()
    return f"{type(error).__name__}: {message[:_MAX_ERROR_CHARACTERS]}{place}"
