"""The sandbox: limits, isolation, and removal of everything that a program leaves."""

from __future__ import annotations

import functools
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sandbox_users import ORDINARY, run_as

from infra.sandbox import running, zygotes
from infra.sandbox.run import Isolation, Limits, ProgramResult, SandboxUnavailable
from infra.sandbox.run import run_python as run_with
from infra.scratch import locked_folder

DENIED = b"PermissionError"
GONE = b"Error: [Errno"  # with namespaces the file does not exist

pytestmark = pytest.mark.usefixtures("confined")


@pytest.fixture(params=[True, False], ids=["namespaces", "none"])
def isolation(request: pytest.FixtureRequest) -> Isolation:
    chosen = Isolation(namespaces=request.param)
    try:
        run_with("", isolation=chosen)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    return chosen


@pytest.fixture
def run_python(isolation: Isolation) -> Callable[..., ProgramResult]:
    return functools.partial(run_with, isolation=isolation)


@pytest.mark.parametrize(
    ("program", "errors"),
    [
        ("import os\nwhile True: os.fork()", DENIED),
        ("import subprocess; subprocess.run(['true'])", DENIED),
        ("import multiprocessing as m; m.get_context('fork').Process(target=print).start()", DENIED),
        ("import os; os.execv('/bin/true', ['true'])", DENIED),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", DENIED),
        ("import socket; socket.socket(socket.AF_UNIX)", DENIED),
        ("import os; os.kill(os.getppid(), 9)", DENIED),
        ("import os; os.setsid()", DENIED),
        ("import os; os.memfd_create('x')", DENIED),
        ("import os; print(open(f'/proc/{os.getppid()}/environ').read())", GONE),
        ("print(open('/etc/passwd').read())", GONE),
        ("import os; print(os.listdir('/usr'), os.listdir('/usr/src'))", GONE),
        ("import os; print(os.listdir('/usr/local/src'))", GONE),
        ("open('/tmp/laminar-escaped', 'w')", GONE),
        ("import os; os.mkdir('deeper')", DENIED),
        ("import os; os.symlink('/etc', 'there')", DENIED),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", b"not allowed to raise maximum limit"),
        ("x = bytearray(10**9)", b"MemoryError"),
        ("import mmap; mmap.mmap(-1, 10**9)", b"Cannot allocate memory"),
        (
            "from threading import *\nwhile True: Thread(target=Event().wait, daemon=True).start()",
            b"start new thread",
        ),
        ("open('big', 'wb').write(bytes(10**8))", b"File too large"),
        ("raise SystemExit(3)", b""),
    ],
)
def test_forbidden_operation_raises_in_the_program(
    program: str, errors: bytes, run_python: Callable[..., ProgramResult]
) -> None:
    ran = run_python(program, limits=Limits(seconds=20.0, memory_mb=256))
    assert errors in ran.errors
    assert ran.status != 0
    assert not os.path.exists("/tmp/laminar-escaped")


@pytest.mark.parametrize(
    ("program", "ended"),
    [
        ("while True: pass", "time"),
        ("import time; time.sleep(60)", "time"),
        ("import signal as s\nfor n in (1, 2, 15, 24): s.signal(n, s.SIG_IGN)\nwhile True: pass", "time"),
        ("import os, time\nos.closerange(0, 30)\ntime.sleep(60)", "time"),
        ("while True: print('x' * 1000)", "output"),
        ("import os\nwhile True: os.write(2, b'x' * 1000)", "output"),
        ("n = 0\nwhile True:\n  open(f'f{n}', 'wb').write(bytes(10**6)); n += 1", "disk"),
        ("n = 0\nwhile True: open(f'f{n}', 'w').close(); n += 1", "disk"),
        ("import os; os.abort()", "killed"),
    ],
)
def test_program_is_stopped_at_its_limits(program: str, ended: str, run_python: Callable[..., ProgramResult]) -> None:
    limits = Limits(seconds=1.0 if ended == "time" else 30.0, memory_mb=256, disk_mb=2)
    ran = run_python(program, limits=limits)
    assert ran.ended == ended
    assert len(ran.output) + len(ran.errors) <= 2 * limits.output_bytes


def test_program_has_input_folder_and_threads_but_no_environment(
    monkeypatch: pytest.MonkeyPatch, run_python: Callable[..., ProgramResult]
) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    program = (
        "import os, sys, tempfile, threading, asyncio, json\n"
        "open('mine', 'w').write(sys.stdin.read().upper())\n"
        "t = threading.Thread(target=lambda: print(open('mine').read())); t.start(); t.join()\n"
        "asyncio.run(asyncio.sleep(0))\n"
        "with tempfile.NamedTemporaryFile() as f: assert os.path.dirname(f.name) == os.getcwd()\n"
        "print(os.listdir('.'), 'A_TOKEN' in os.environ, __name__)\n"
    )
    ran = run_python(program, b"words " * 20_000, Limits(seconds=20.0, output_bytes=200_000))
    assert (ran.ended, ran.status, ran.errors) == ("exited", 0, b"")
    assert ran.output == b"WORDS " * 20_000 + b"\n['mine'] False __main__\n"


def test_program_leaves_no_files_or_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_python: Callable[..., ProgramResult]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(os.listdir("/proc/self/fd"))
    run_python("open('f', 'w'); print(1)", limits=Limits(seconds=20.0))
    run_python("import time; open('f', 'w'); time.sleep(9)", b"x" * 200_000, Limits(seconds=0.3))
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before


def test_program_ends_with_its_supervisor(tmp_path: Path, isolation: Isolation) -> None:
    parent = f"""
from infra.sandbox import running, run
def note(self, message, noted=running.Running._record):
    noted(self, message)
    if "pid" in message: print(message["pid"], flush=True)
running.Running._record = note
run.run_python("while True: pass", limits=run.Limits(seconds=60.0), isolation=run.{isolation!r})
"""
    own = os.environ | {"TMPDIR": str(tmp_path)}  # a killed parent leaves the program's folder
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, env=own) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert os.path.exists(f"/proc/{child}")
        process.kill()
    wait_until_gone(child)


def test_zygote_removes_folders_of_killed_supervisors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = f"with locked_folder({zygotes.PROGRAM_FOLDERS!r}) as made: print(made, flush=True), input()"
    parent = f"from infra.scratch import locked_folder\n{made}"
    own = os.environ | {"TMPDIR": str(tmp_path)}
    arguments = [sys.executable, "-c", parent]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        (left / "big").write_text("x")
        process.kill()
    assert list(tmp_path.iterdir()) == [left]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with locked_folder(zygotes.PROGRAM_FOLDERS) as used:
        zygotes.Zygote(Isolation(namespaces=False)).close()
        assert list(tmp_path.iterdir()) == [used]
    assert list(tmp_path.iterdir()) == []


def test_program_is_run_again_when_its_zygote_dies(isolation: Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    record = running.Running._record

    def kill_the_first(self: running.Running, message: dict[str, Any]) -> None:
        record(self, message)
        if self._pid is not None and self._ready and self._pid not in pids:
            pids.append(self._pid)
            if len(pids) == 1:
                zygotes.ZYGOTES.get(isolation)._process.send_signal(signal.SIGKILL)

    write = running.Running._write_input

    def write_later(self: running.Running, key: selectors.SelectorKey) -> None:
        """The first program gets no input, so that it cannot end before its zygote."""
        if len(pids) == 2 or bytes(key.data) != b"done\n":
            write(self, key)

    monkeypatch.setattr(running.Running, "_record", kill_the_first)
    monkeypatch.setattr(running.Running, "_write_input", write_later)
    ran = run_with("print(input())", b"done\n", Limits(seconds=60.0), isolation)
    assert (ran.ended, ran.output) == ("exited", b"done\n")
    assert len(pids) == 2
    wait_until_gone(pids[0])


def test_zygotes_replace_a_dead_zygote(isolation: Isolation) -> None:
    zygote = zygotes.ZYGOTES.get(isolation)
    zygote._process.kill()
    zygote._process.wait()
    assert run_with("print(1)", limits=Limits(seconds=30.0), isolation=isolation).output == b"1\n"
    assert zygotes.ZYGOTES.get(isolation) is not zygote


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}")


def test_programs_share_no_memory_or_files(run_python: Callable[..., ProgramResult]) -> None:
    limits = Limits(seconds=20.0)
    run_python("import builtins, random\nbuiltins.left = 1\nopen('left', 'w').close()", limits=limits)
    ran = run_python("import builtins, os\nprint(hasattr(builtins, 'left'), os.listdir('.'))", limits=limits)
    assert ran.output == b"False []\n"
    drawn = {run_python("import random; print(random.random())", limits=limits).output for _ in range(3)}
    assert len(drawn) == 3


def test_program_runs_as_main_with_its_own_traceback(run_python: Callable[..., ProgramResult]) -> None:
    limits = Limits(seconds=20.0)
    ran = run_python("import __main__\nx = 1\nassert __main__.x == 1\nraise ValueError('so')", limits=limits)
    assert (
        ran.errors
        == b"""Traceback (most recent call last):\n  File "<program>", line 4, in <module>\nValueError: so\n"""
    )
    assert run_python("raise SystemExit('no')", limits=limits).errors == b"no\n"
    assert run_python("import atexit; atexit.register(print, 'end')", limits=limits).output == b"end\n"


def test_sandbox_rejects_an_old_landlock_abi() -> None:
    with pytest.raises(SandboxUnavailable, match=r"ABI 2 on this machine and must have 3 .*truncated"):
        run_with("", isolation=Isolation(newest_abi=2))


@pytest.mark.skipif(os.getuid() != 0, reason="root alone can run as another user")
def test_threads_of_an_ordinary_user_are_limited_by_the_kernel() -> None:
    program = (
        "from threading import *\nmade = 0\ntry:\n  while True: Thread(target=Event().wait, daemon=True).start();"
        " made += 1\n"
        "except RuntimeError: print(made)"
    )
    asked = f"""
from infra.sandbox.run import *
print(run_python({program!r}, limits=Limits(seconds=20.0, threads=10), isolation=Isolation(namespaces=True)))
"""
    ran = run_as(ORDINARY, ["-c", asked], timeout=60)
    if "SandboxUnavailable" in ran.stderr:
        pytest.skip(ran.stderr.splitlines()[-1])
    assert "output=b'9\\n'" in ran.stdout, ran


@pytest.mark.parametrize("field", ["seconds", "memory_mb", "disk_mb", "output_bytes", "threads"])
def test_limits_must_be_positive(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Limits(**{field: 0})


@pytest.mark.parametrize("memory_mb", [512.0, 1e9, 10**14, float("inf")])
def test_program_runs_with_any_positive_memory_limit(memory_mb: Any) -> None:
    assert run_with("print(1)", limits=Limits(seconds=20.0, memory_mb=memory_mb)).output == b"1\n"


def test_limit_that_cannot_be_set_makes_the_sandbox_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_rlimits", lambda limits, namespaces: {"AS": 1e9})
    with pytest.raises(SandboxUnavailable, match=r"cannot confine a program: .*float"):
        run_with("")
