"""Starts a program whose sockets are bound to loopback: `python -P -m infra.runners.loopback PROGRAM [ARGUMENT...]`.

For servers that bind all interfaces and have no option against it, such as Beam's Java servers. A seccomp filter passes
each `bind` of the program to this process, which binds 127.0.0.1 in the place of 0.0.0.0 and ::, and leaves other
addresses as they are. It needs Linux 5.6 and no privileges. It is no sandbox: a program that wants to evade it can.
Source: seccomp_unotify(2), pidfd_getfd(2), linux/seccomp.h.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from infra.sandbox import linux

_SECCOMP, _BIND = {"x86_64": 317, "aarch64": 277}, {"x86_64": 49, "aarch64": 200}
_PIDFD_OPEN, _PIDFD_GETFD = 434, 438  # the same numbers on every machine
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NOTIFY, _ALLOW = 0x7FC00000, 0x7FFF0000
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_NOTICE, _RESPONSE = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_MAX_ADDRESS = 128
_LOOPBACK = "127.0.0.1"
_CANNOT = "its sockets cannot be bound to loopback here"
_ADVICE = "If a container or a firewall blocks other machines, set LAMINAR_ALLOW_EXPOSED_RUNNERS=1 to start it without"


def loopback_command(command: Sequence[str]) -> list[str]:
    """`command`, started by this module."""
    return [sys.executable, "-P", "-m", "infra.runners.loopback", *command]


def main() -> None:
    """Run the program until it ends, and end in the same way. SIGTERM is passed on."""
    ours, theirs = socket.socketpair()
    parent, child = os.getpid(), os.fork()
    if not child:
        _become(sys.argv[1:], theirs, parent)
    theirs.close()
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if descriptors:
        _serve(descriptors[0])
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    sys.exit(code if code >= 0 else 128 - code)


def _become(command: list[str], notices: socket.socket, parent: int) -> NoReturn:
    """Filter the calls of this process, send the filter's listener, and become the program."""
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(os.EX_OSERR)
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        machine = os.uname().machine
        steps = [
            (_LOAD, 0, 0, 0),
            (_JUMP_EQUAL, 0, 1, _BIND[machine]),
            (_RETURN, 0, 0, _NOTIFY),
            (_RETURN, 0, 0, _ALLOW),
        ]
        code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
        header = struct.pack("@HP", len(steps), ctypes.addressof(code))
        listener = linux.call(_SECCOMP[machine], _SET_MODE_FILTER, _NEW_LISTENER, header)
        socket.send_fds(notices, [b"f"], [listener])
        os.close(listener)
        os.execv(command[0], command)
    except (OSError, KeyError, AttributeError) as error:
        sys.stderr.write(f"{command[0]}: {_CANNOT} ({error!r}). {_ADVICE}\n")
    finally:
        os._exit(os.EX_OSERR)


def _serve(listener: int) -> None:
    """Answer each bind until no process has the filter."""
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    while True:
        for _, events in waiting.poll():
            if not events & select.POLLIN:
                return
            notice = bytearray(_NOTICE.size)
            try:
                fcntl.ioctl(listener, _RECEIVE, notice)
            except (FileNotFoundError, InterruptedError):  # the thread has ended meanwhile, or was interrupted
                continue
            number, thread, _, _, _, _, descriptor, address, length, *_ = _NOTICE.unpack(notice)
            response = _RESPONSE.pack(number, 0, *_answer(thread, descriptor, address, length))
            with suppress(FileNotFoundError):
                fcntl.ioctl(listener, _SEND, response)


def _answer(thread: int, descriptor: int, address: int, length: int) -> tuple[int, int]:
    """The error of a call and the flags of its response; binds the socket if the address is for all interfaces."""
    try:
        with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            port = _port_on_all_interfaces(memory.read(min(length, _MAX_ADDRESS)))
        if port is None:
            return 0, _CONTINUE
        with _socket_of(_process_of(thread), descriptor) as bound:
            host = _LOOPBACK if bound.family == socket.AF_INET else f"::ffff:{_LOOPBACK}"
            bound.bind((host, port))
        return 0, 0
    except OSError as error:
        return -(error.errno or 1), 0


def _port_on_all_interfaces(address: bytes) -> int | None:
    """The port in the socket address `address` if it is of all interfaces, else None."""
    family = int.from_bytes(address[:2], sys.byteorder)
    host = {socket.AF_INET: address[4:8], socket.AF_INET6: address[8:24]}.get(family)  # type: ignore[call-overload]
    return int.from_bytes(address[2:4], "big") if host is not None and not any(host) else None


def _process_of(thread: int) -> int:
    with open(f"/proc/{thread}/status", encoding="ascii", errors="replace") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Tgid:"))


def _socket_of(process: int, descriptor: int) -> socket.socket:
    """A duplicate of the socket `descriptor` of `process`."""
    opened = linux.call(_PIDFD_OPEN, process, 0)
    try:
        return socket.socket(fileno=linux.call(_PIDFD_GETFD, opened, descriptor, 0))
    finally:
        os.close(opened)


if __name__ == "__main__":
    main()
