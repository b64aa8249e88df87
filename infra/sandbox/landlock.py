"""Landlock: permanently restricts a process to named files, and its signals and abstract sockets to its domain.

Source: linux/landlock.h. Imports nothing but the standard library.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from infra.sandbox import linux

MIN_ABI = 3
"""Linux 6.2, the first that restricts truncation: below it a program could empty files that it must not touch."""

# The calls have the same numbers on every machine.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 1 << 1, 1 << 2, 1 << 3
_REMOVE_FILE, _MAKE_FILE, _TRUNCATE, _IOCTL_DEVICE = 1 << 5, 1 << 8, 1 << 14, 1 << 15
_BIND_AND_CONNECT = 0b11
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11


def newest_abi() -> int:
    """The ABI version of Landlock in this kernel; 0 without Landlock."""
    try:
        return linux.call(_CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


def unsupported_reason(abi: int) -> str | None:
    """Why `abi` is not enough, or None."""
    if abi >= MIN_ABI:
        return None
    return (
        f"Landlock has ABI {abi} on this machine and must have {MIN_ABI} (Linux 6.2): below it files outside the "
        f"sandbox can be truncated. Use a newer kernel, with landlock among its lsm="
    )


def restrict(readable: Iterable[str], writable: str, abi: int) -> None:
    """Let this process read below `readable` and write files in `writable` alone.

    With ABI 6 its signals and abstract sockets stay in its domain. Paths that do not exist are ignored. Raises OSError
    where the kernel refuses.
    """
    every = _every_right(abi)
    # Fields that this ABI does not know must not be given, or be zero.
    fields = [every, _BIND_AND_CONNECT if abi >= 4 else 0, _ABSTRACT_SOCKETS_AND_SIGNALS if abi >= 6 else 0]
    attributes = struct.pack("<3Q", *fields)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = linux.call(_CREATE_RULESET, attributes, len(attributes), 0)
    for path in filter(os.path.exists, readable):
        _allow(ruleset, path, _EXECUTE | _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0))
    _allow(ruleset, "/dev/null", _READ_FILE | _WRITE_FILE)
    _allow(ruleset, writable, _WRITE_FILE | _READ_FILE | _READ_DIR | _REMOVE_FILE | _MAKE_FILE | _TRUNCATE)
    linux.call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _every_right(abi: int) -> int:
    """All file rights of `abi`: the kernel refuses those that no rule grants."""
    named = {1: 13, 2: 14, 3: 15, 4: 15}
    return (1 << named.get(abi, 16)) - 1


def _allow(ruleset: int, path: str, rights: int) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        linux.call(_ADD_RULE, ruleset, 1, struct.pack("<Qi", rights, parent), 0)
    finally:
        os.close(parent)
