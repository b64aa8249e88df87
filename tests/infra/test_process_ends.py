"""The end of a process is seen even while its parent does not reap it, as in a container without an init process."""

from __future__ import annotations

import subprocess
import sys

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
