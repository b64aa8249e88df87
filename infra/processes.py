"""Long-running processes: started in their own session, with a defined lifetime, identified and stopped."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

# Runs between fork and the command itself, as a program of its own: a hook inside the forked interpreter
# (`preexec_fn`) is not safe beside other threads. Arguments: the parent's pid or 0, then the command.
_SHIM = """
import ctypes, os, signal, sys
parent, megabytes = int(sys.argv[1]), int(sys.argv[2])
os.closerange(3, 4096)
if megabytes:
    import resource
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = megabytes << 20 if hard == resource.RLIM_INFINITY else min(megabytes << 20, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
if parent and sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit("the parent process has ended")
os.execv(sys.argv[3], sys.argv[3:])
"""


def spawn(
    command: list[str], log_file: Path, *, die_with_parent: bool, variables: Mapping[str, str] | None = None
) -> psutil.Process:
    """Start a command in its own session, with its output appended to a file, and return its process.

    `variables` are added to its environment. `die_with_parent`: the kernel kills it (SIGKILL) as soon as this process
    ends for any reason. Linux only; elsewhere the process runs until it is stopped. In its own session it does not
    receive Ctrl-C from the terminal. Raises OSError if the process cannot be created.
    """
    parent = os.getpid() if die_with_parent else 0
    argv = [sys.executable, "-I", "-S", "-c", _SHIM, str(parent), "0", *command]

    def start() -> int:
        return os.posix_spawn(
            sys.executable,
            argv,
            {**os.environ, **(variables or {})},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log_file), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )

    return psutil.Process(_in_permanent_thread(start) if die_with_parent else start())


def die_with_parent_command(command: list[str], memory_limit_mb: int | None = None) -> list[str]:
    """`command` preceded by a program that has the kernel kill it as soon as this process ends (Linux only).

    The thread that starts it must live as long. `memory_limit_mb`: what it, and each process that it starts, can write
    to in memory of its own, in MiB. It is no limit of address space, of which JavaScript engines reserve far more.
    """
    program = command[0] if os.path.isabs(command[0]) else shutil.which(command[0]) or command[0]
    return [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), str(memory_limit_mb or 0), program, *command[1:]]


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads its session, and the processes in its group; wait for it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def is_running(process: psutil.Process) -> bool:
    """Whether this process still runs: not another one with its id, and not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stop_process(process: psutil.Process, timeout: float) -> None:
    """Stop a process and wait for its end: SIGTERM, then SIGKILL after `timeout` seconds (0: at once).

    Raises `psutil.TimeoutExpired` if it does not end.
    """
    with suppress(psutil.NoSuchProcess):
        if timeout > 0:
            process.send_signal(signal.SIGTERM)
            with suppress(psutil.TimeoutExpired):
                _wait_for_end(process, timeout)
                return
        process.kill()
        _wait_for_end(process, 10.0)


def reap(process: psutil.Process, timeout: float) -> None:
    """Reap a child that has ended; does nothing for a process that is not a child of this one.

    A process is a zombie once its first thread has ended. A child can be reaped when all have, for which this waits
    `timeout` seconds at most: only then are its files and ports free, and its CPU time counts as that of a child.
    """
    with suppress(psutil.Error):
        process.wait(timeout if process.ppid() == os.getpid() else 0)


def _wait_for_end(process: psutil.Process, timeout: float) -> None:
    """Wait until `process` has ended, and reap a child. psutil's `wait` waits until its parent has reaped it, too."""
    deadline = time.monotonic() + timeout
    while is_running(process):
        if time.monotonic() > deadline:
            raise psutil.TimeoutExpired(timeout, process.pid)
        time.sleep(0.02)
    reap(process, max(0.0, deadline - time.monotonic()))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file during the `with` block; other processes wait for it."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def is_locked(file: Path) -> bool:
    """Whether a process, also of another container, holds an exclusive lock on `file`; False if there is no file."""
    try:
        with file.open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no file, or its file system has no locks
        return False
    return False


def _in_permanent_thread(start: Callable[[], int]) -> int:
    """Call `start` in a thread that runs until the end of this process.

    The kernel sends the death signal when the *thread* that started the child ends, so a child started from a
    short-lived worker thread would be killed with that thread.
    """
    if threading.current_thread() is threading.main_thread():
        return start()
    pid: Future[int] = Future()

    def start_and_wait() -> None:
        try:
            pid.set_result(start())
        except OSError as error:
            pid.set_exception(error)
            return
        threading.Event().wait()

    threading.Thread(target=start_and_wait, name="parent of child", daemon=True).start()
    return pid.result()


def signal_name(number: int) -> str:
    """The name of signal `number`; a real-time signal has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_line(log: Path) -> str:
    """The last line in the log of a process."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "its log is empty"
