"""The temporary folder of a run's roles, and the end of its zygote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import psutil
import pytest

from pipelines.inspect.run_files import ZYGOTE_LOG
from pipelines.run import zygote, zygote_process
from pipelines.run.zygote_process import ZygoteProcess, temporary_folder, wait_for_zygote


def test_temporary_folder_of_a_resumed_run_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = Path(temporary_folder(Path("runs/first/logs")))
    (first / "beam-pipeline-temp").mkdir()
    assert Path(temporary_folder(Path("runs/first/logs"))) == first
    assert list(first.iterdir()) == []
    assert first.stat().st_mode & 0o777 == 0o700
    other = Path(temporary_folder(Path("runs/second/logs")))
    assert other != first


def test_temporary_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    foreign = Path(temporary_folder(Path("runs/first/logs")))
    foreign.rmdir()
    (tmp_path / "elsewhere").mkdir()
    foreign.symlink_to(tmp_path / "elsewhere")
    found = Path(temporary_folder(Path("runs/first/logs")))
    assert found not in (foreign, tmp_path / "elsewhere")
    assert found.is_dir()


def test_roles_of_a_killed_supervisor_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ignoring = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    role = subprocess.Popen([sys.executable, "-c", ignoring], stdout=subprocess.PIPE)
    assert role.stdout is not None
    assert role.stdout.readline() == b"\n"
    ended = zygote._Zygote(0, 1)
    ended._running = {role.pid: "trainer"}
    monkeypatch.setattr(zygote, "GRACE_S", 600.0)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    ended._end()
    assert not psutil.pid_exists(role.pid)
    role.stdout.close()
    role.returncode = -signal.SIGKILL  # the zygote has reaped it


def test_zygote_of_a_killed_run_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes the store and the temporary folder at its end, and a resumed run has the same ones."""
    log = tmp_path / ZYGOTE_LOG
    assert wait_for_zygote(log, lambda: None, 0.0)
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    started = partial(subprocess.Popen, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    monkeypatch.setattr(zygote_process, "start_zygote", lambda file, model: started(stderr=file))
    process = ZygoteProcess(log, "", tmp_path / "store")
    assert not wait_for_zygote(log, lambda: None, 0.1)

    def check() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        wait_for_zygote(log, check)
    process.ready = True
    process.close()
    assert wait_for_zygote(log, lambda: None, 0.0)
