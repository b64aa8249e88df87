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


WITHOUT_PIDFD_GETFD = """
import ctypes, os, struct, sys
from infra.sandbox import linux
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 438), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
linux.prctl(linux.PR_SET_SECCOMP, ctypes.c_char_p(struct.pack("@HP", len(steps), ctypes.addressof(code))))
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Starts a program as containers do by default: pidfd_getfd is refused with EPERM."""


def start(code: str, *arguments: str, within: str = "") -> subprocess.Popen[str]:
    command = loopback_command([sys.executable, "-c", code, *arguments])
    command = [sys.executable, "-c", within, *command] if within else command
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("within", ["", WITHOUT_PIDFD_GETFD], ids=["", "as in a container"])
def test_sockets_of_all_interfaces_are_bound_to_loopback(within: str) -> None:
    with start(f"{BINDS}\nimport time; time.sleep(600)", f"listening-{bool(within)}", within=within) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        (child,) = psutil.Process(process.pid).children()
        sockets = listening_sockets([child])
        process.kill()  # the program ends with it
        child.wait(30)
    assert json.loads(line) == [98, "127.0.0.1", "::ffff:127.0.0.1", "127.0.0.1", "127.0.0.2"]
    assert len(sockets) == 4
    assert not exposed_addresses(sockets)


def test_bind_of_an_address_that_is_read_only_fails() -> None:
    """It listens nowhere, rather than on all interfaces. (Linux lets private memory be written all the same.)"""
    code = """
import ctypes, mmap, os, socket, tempfile
with tempfile.TemporaryFile() as file:
    file.write((2).to_bytes(2, "little") + bytes(14)); file.flush()
    four, libc = socket.socket(), ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    at = libc.mmap(None, ctypes.c_size_t(4096), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), ctypes.c_long(0))
    result = libc.bind(four.fileno(), ctypes.c_void_p(at), 16)
    print(result, ctypes.get_errno() != 0, four.getsockname()[1])
"""
    with start(code) as process:
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "-1 True 0\n"), error


@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137), ("print('x' * 100000)", 0)],
)
def test_exit_codes_are_those_of_the_program(code: str, expected: int) -> None:
    with start(code) as process:
        process.communicate(timeout=60)
        assert process.returncode == expected


def test_sigterm_is_passed_on() -> None:
    bound = "import socket; socket.socket().bind(('', 0))"  # so the parent already serves, and passes signals on
    with start(f"{bound}; import time; print(1, flush=True); time.sleep(600)") as process:
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
