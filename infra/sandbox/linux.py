"""System calls that Python's standard library lacks, through ctypes. Imports nothing but the standard library."""

from __future__ import annotations

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_RDONLY, MOUNT_NOSUID, MOUNT_NODEV = 1, 2, 4
"""Attributes of mount_setattr (linux/mount.h), which are not the flags of mount."""
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_SETATTR = 442  # the same number on every machine

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522


def call(number: int, *arguments: object) -> int:
    """A system call by number. Raises OSError."""
    values = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    return checked(_LIBC.syscall(ctypes.c_long(number), *values), f"call {number}")


def prctl(option: int, value: object = 0) -> None:
    """Raises OSError."""
    second = value if isinstance(value, ctypes.c_char_p) else ctypes.c_ulong(value)  # type: ignore[arg-type]
    third = second if option == PR_SET_SECCOMP else ctypes.c_ulong(0)
    second = ctypes.c_ulong(2) if option == PR_SET_SECCOMP else second  # SECCOMP_MODE_FILTER
    checked(_LIBC.prctl(option, second, third, ctypes.c_ulong(0), ctypes.c_ulong(0)), f"prctl {option}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces. Raises OSError."""
    checked(_LIBC.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Raises OSError."""
    encoded = [each.encode() for each in (source, target, kind)]
    checked(_LIBC.mount(*encoded, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def limit_mount(target: str, attributes: int, below: bool) -> None:
    """Add attributes to the mount `target`, and to those below it. Raises OSError."""
    buffer = ctypes.create_string_buffer(attributes.to_bytes(8, "little") + bytes(24))
    call(
        _MOUNT_SETATTR,
        _AT_FDCWD,
        target.encode(),
        _AT_RECURSIVE if below else 0,
        buffer,
        len(buffer) - 1,
    )


def enter_root(folder: str) -> None:
    """Make the mount `folder` the root of the file system, and detach the old one. Raises OSError."""
    os.chdir(folder)
    call(_PIVOT_ROOT[os.uname().machine], b".", b".")
    checked(_LIBC.umount2(b".", MNT_DETACH), "umount the old root")
    os.chdir("/")


def drop_capabilities() -> None:
    """Drop every capability of this thread; with no_new_privs set for good. Raises OSError."""
    header = _CAPABILITY_VERSION_3.to_bytes(4, "little") + bytes(4)
    call(_CAPSET[os.uname().machine], header, bytes(24))


def checked(result: int, what: str) -> int:
    """Return `result` unless it reports an error. Raises OSError."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
