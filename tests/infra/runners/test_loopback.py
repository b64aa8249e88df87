"""A program that binds all interfaces listens on loopback, and runs as without the filter otherwise."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra.listening import exposed_addresses, listening_sockets
from infra.runners.loopback import loopback_command

ROOT = Path(__file__).parents[3]
BINDS = """
import json, socket, sys, threading
four, six, datagrams, own = socket.socket(), socket.socket(socket.AF_INET6), socket.socket(type=2), socket.socket()
six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
def bind():
    for each, host in ((four, "0.0.0.0"), (six, "::"), (datagrams, ""), (own, "127.0.0.2")):
        each.bind((host, 0))
bound = threading.Thread(target=bind); bound.start(); bound.join()  # Java's are not bound by its first thread either
for each in (four, six, own): each.listen()
try: socket.socket().bind(("", four.getsockname()[1])); error = 0
except OSError as refused: error = refused.errno
abstract = socket.socket(socket.AF_UNIX); abstract.bind("\\0laminar-test-" + sys.argv[1])
print(json.dumps([error, *(each.getsockname()[0] for each in (four, six, datagrams, own))]), flush=True)
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = loopback_command([sys.executable, "-c", code, *arguments])
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_sockets_of_all_interfaces_are_bound_to_loopback() -> None:
    with start(f"{BINDS}\nimport time; time.sleep(600)", "listening") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == [98, "127.0.0.1", "::ffff:127.0.0.1", "127.0.0.1", "127.0.0.2"]
        (child,) = psutil.Process(process.pid).children()
        sockets = listening_sockets([child])
        assert len(sockets) == 4
        assert not exposed_addresses(sockets)
        process.kill()  # the program ends with it
        child.wait(30)


@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137), ("print('x' * 100000)", 0)],
)
def test_exit_codes_are_those_of_the_program(code: str, expected: int) -> None:
    with start(code) as process:
        process.communicate(timeout=60)
        assert process.returncode == expected


def test_sigterm_is_passed_on() -> None:
    with start("import time; print(1, flush=True); time.sleep(600)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


def test_program_is_not_started_if_its_sockets_cannot_be_bound() -> None:
    """An unknown machine stands for a kernel without the filter."""
    code = "import os, sys; os.uname = lambda: type('', (), {'machine': 'vax'}); sys.argv[1:] = ['/bin/true']\n"
    code += "from infra.runners import loopback; loopback.main()"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 71
    assert "its sockets cannot be bound to loopback here" in ran.stderr
    assert "LAMINAR_ALLOW_EXPOSED_RUNNERS=1" in ran.stderr
