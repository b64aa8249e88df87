"""Starts a program whose sockets are bound to loopback: `python -P -m infra.runners.loopback PROGRAM [ARGUMENT...]`.

For servers that bind all interfaces and have no option against it, such as Beam's Java servers. A seccomp filter passes
each `bind` of the program to this process, which writes 127.0.0.1 in the place of 0.0.0.0 and :: into the program's
memory, and lets the call continue; other addresses stay as they are. It needs Linux 5.8 and no privileges, also in a
container without capabilities: profiles such as Kubernetes' RuntimeDefault refuse pidfd_getfd(2), by which the socket
could be bound here, and permit /proc/PID/mem of a child.

It is no sandbox. The kernel reads the address again when the call continues, so another thread of a hostile program can
write 0.0.0.0 back before. This protects our own servers from listening widely, and those bind an address that the
calling thread alone has made. The changed address stays in the program's memory: a program that binds it again, after
a port in use, gets loopback, too. Memory that cannot be written is an error of the call. Source: seccomp_unotify(2),
proc(5), linux/seccomp.h.
"""

from __future__ import annotations

import ctypes
import errno
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
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NOTIFY, _ALLOW = 0x7FC00000, 0x7FFF0000
_RECEIVE, _SEND, _IS_VALID = 0xC0502100, 0xC0182101, 0x40082102
_CONTINUE = 1
_NOTICE, _RESPONSE = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
_MAX_ADDRESS = 128
_LOOPBACK = {
    socket.AF_INET: (4, socket.inet_aton("127.0.0.1")),
    socket.AF_INET6: (8, socket.inet_pton(socket.AF_INET6, "::ffff:127.0.0.1")),
}
"""Where the host is in a socket address of a family, and loopback's."""
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
            number, thread, _, _, _, _, _, address, length, *_ = _NOTICE.unpack(notice)
            error = _replace_address(listener, number, thread, address, length)
            response = _RESPONSE.pack(number, 0, -error, 0 if error else _CONTINUE)
            with suppress(FileNotFoundError):
                fcntl.ioctl(listener, _SEND, response)


def _replace_address(listener: int, number: int, thread: int, address: int, length: int) -> int:
    """Replace the address of all interfaces that call `number` of `thread` binds; the error of the call, 0: none."""
    try:
        with open(f"/proc/{thread}/mem", "r+b", buffering=0) as memory:
            fcntl.ioctl(listener, _IS_VALID, struct.pack("=Q", number))  # else it may be of a later process
            memory.seek(address)
            replacement = _replacement(memory.read(min(length, _MAX_ADDRESS)))
            if replacement is not None:
                offset, host = replacement
                memory.seek(address + offset)
                if memory.write(host) != len(host):
                    return errno.EFAULT
        return 0
    except OSError as error:
        return error.errno or errno.EPERM


def _replacement(address: bytes) -> tuple[int, bytes] | None:
    """The bytes to write into the socket address `address`, and where; None unless it is of all interfaces."""
    offset, host = _LOOPBACK.get(int.from_bytes(address[:2], sys.byteorder), (0, b""))  # type: ignore[call-overload]
    return (offset, host) if host and address[offset : offset + len(host)] == bytes(len(host)) else None


if __name__ == "__main__":
    main()
