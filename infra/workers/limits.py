"""What a worker process may use up, put on from inside it.

The limits are rlimits on address space, CPU, file size, descriptors and processes, and an audit hook for what rlimits
cannot stop (they do not bind root's forks). They catch mistakes and accidents; they are no sandbox against malice (see
infra/sandbox).
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

_MAX_ERROR_LETTERS = 500
_FILE_BYTES = 16 * 1024 * 1024
_DESCRIPTORS = 256
_PR_SET_PDEATHSIG = 1
_STARTS_PROCESSES = frozenset(
    {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "subprocess.Popen"}
)


def die_with(parent: int) -> None:
    """End this process as soon as `parent` ends, however it does (Linux; elsewhere at the end of the requests)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it was asked about
        os._exit(0)


def limit_memory_and_files(memory_limit_mb: int) -> None:
    """Bound address space, file sizes and descriptors, and leave no core files."""
    lower_limit(resource.RLIMIT_AS, memory_limit_mb * 1024 * 1024)
    lower_limit(resource.RLIMIT_FSIZE, _FILE_BYTES)
    lower_limit(resource.RLIMIT_NOFILE, _DESCRIPTORS)
    lower_limit(resource.RLIMIT_CORE, 0)


def limit_cpu(seconds: float) -> None:
    """Bound the CPU time from now on: the last resort where the pool itself cannot act."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime + seconds) + 1, hard))


def lower_limit(which: int, value: int) -> None:
    """Set a soft and hard limit, never above the hard one in force."""
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(which, (value, value))


def forbid_processes(audit: Callable[[Any], None] = sys.addaudithook) -> None:
    """Make starting a process an error. For good: an audit hook cannot be taken back."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS_PROCESSES:
            raise PermissionError("a worker must not start processes (set allow_processes = true to let them)")

    audit(refuse)
    lower_limit(resource.RLIMIT_NPROC, 0)


def describe_error(error: BaseException) -> str:
    """`error` in a line: its class, its words, and where it arose."""
    place, trace = "", error.__traceback__
    while trace is not None:
        place = f" ({os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})"
        trace = trace.tb_next
    try:
        words = str(error)
    except Exception as second:  # noqa: BLE001 - so may an exception's own __str__
        words = f"its message cannot be read: {type(second).__name__}"
    words = words.encode("ascii", "backslashreplace").decode()
    return f"{type(error).__name__}: {words[:_MAX_ERROR_LETTERS]}{place}"
