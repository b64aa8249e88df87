"""The end of a process is seen even while its parent does not reap it, as in a container without an init process."""

from __future__ import annotations

import platform
import subprocess
import sys
import time

import psutil
import pytest

from infra.processes import is_running, stop_process

_PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""
_IGNORES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
_CHILD = "import time; print(flush=True); time.sleep(600)"
_THREAD_OUTLIVES_THE_FIRST = """
import ctypes, sys, threading, time
threading.Thread(target=time.sleep, args=(0.5,)).start()
print(flush=True)
ctypes.CDLL(None).syscall(ctypes.c_long(int(sys.argv[1])), 0)  # the exit of this thread alone
"""
_EXIT_OF_A_THREAD = {"x86_64": "60", "aarch64": "93"}


@pytest.mark.parametrize("ignores", ["", _IGNORES])
def test_process_that_nobody_reaps_is_stopped(ignores: str) -> None:
    command = [sys.executable, "-c", _PARENT, ignores + _CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert is_running(child)
        stop_process(child, 0.2)
        assert child.status() == psutil.STATUS_ZOMBIE
        assert not is_running(child)
        stop_process(child, 0.2)
        parent.kill()


def test_child_that_is_stopped_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    stop_process(psutil.Process(child.pid), 1.0)
    assert not psutil.pid_exists(child.pid)
    child.returncode = 0  # it was waited for


def test_child_is_reaped_once_its_last_thread_has_ended() -> None:
    """The broker's first thread ends some milliseconds before the others: until then it is a zombie with open files."""
    command = [sys.executable, "-c", _THREAD_OUTLIVES_THE_FIRST, _EXIT_OF_A_THREAD[platform.machine()]]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    process = psutil.Process(child.pid)
    while is_running(process):
        time.sleep(0.01)
    stop_process(process, 10.0)
    assert not psutil.pid_exists(child.pid)
    child.returncode = 0  # it was waited for
    child.stdout.close()
