"""Whatever a program tries, it costs one answer in bounded time, and nothing of it is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.sandbox.run import Limits, run_python

DENIED = b"PermissionError"

pytestmark = pytest.mark.usefixtures("confined")


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
        ("import os; print(open(f'/proc/{os.getppid()}/environ').read())", DENIED),
        ("print(open('/etc/passwd').read())", DENIED),
        ("open('/tmp/laminar-escaped', 'w')", DENIED),
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
def test_what_a_program_must_not_do_is_an_error_of_its_own(program: str, errors: bytes) -> None:
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
def test_what_never_ends_is_ended(program: str, ended: str) -> None:
    limits = Limits(seconds=1.0 if ended == "time" else 30.0, memory_mb=256, disk_mb=2)
    ran = run_python(program, limits=limits)
    assert ran.ended == ended
    assert len(ran.output) + len(ran.errors) <= 2 * limits.output_bytes


def test_a_program_has_its_input_its_folder_its_threads_and_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(os.listdir("/proc/self/fd"))
    run_python("open('f', 'w'); print(1)", limits=Limits(seconds=20.0))
    run_python("import time; open('f', 'w'); time.sleep(9)", b"x" * 200_000, Limits(seconds=0.3))
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_program_ends_with_who_asked_for_it(tmp_path: Path) -> None:
    program = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    parent = f"""
from infra.sandbox import run
class Told(run._Running):
    def _take(self, key):
        super()._take(key)
        print(self._process.pid, flush=True)
run._Running = Told
run.run_python({program!r}, limits=run.Limits(seconds=60.0))
"""
    own = os.environ | {"TMPDIR": str(tmp_path)}  # who is killed leaves the program's folder
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, env=own) as process:
        assert process.stdout is not None
        child = Path("/proc") / process.stdout.readline().strip()
        assert child.exists()
        process.kill()
    end = time.monotonic() + 10
    while child.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not child.exists()


@pytest.mark.parametrize("field", ["seconds", "memory_mb", "disk_mb", "output_bytes"])
def test_limits_are_positive(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Limits(**{field: 0})
