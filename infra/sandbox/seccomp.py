"""Seccomp: permanently restricts a process to the allowed system calls and arguments.

The filter is a classic BPF program: each rule returns a verdict or continues with the next rule. Imports nothing but
the standard library. Source: linux/seccomp.h, linux/filter.h.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable, Sequence

from infra.sandbox import linux
from infra.sandbox.allowed_calls import ALLOWED, ANSWERED, FILTERED, NEWEST

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column of the tables of calls, and seccomp's number of the architecture."""
_LOAD, _AND, _JUMP, _JUMP_EQUAL, _JUMP_ABOVE, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x25, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_MAX_JUMP = 255
_ALL_BITS = 0xFFFFFFFF

# Threads of one process, which share everything: what glibc asks for, and musl, whose old flag means nothing.
_THREAD, _DETACHED = 0x003D0F00, 0x00400000
_O_ASYNC, _MAP_HUGETLB = 0x2000, 0x40000
# Duplicates, close-on-exec, and the flags without O_ASYNC; the size of a pipe. No locks, leases, owners or signals.
_FCNTL, _F_SETFL = (0, 1, 2, 3, 1030, 1032), 4
# Is it a terminal, and how wide; how much is there to read; close-on-exec; blocking.
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5450, 0x5451, 0x5421)
# Wait, wake, requeue, compare and requeue, wake with an operation, wait and wake by bits; private or not.
_FUTEX, _FUTEX_COMMAND = (0, 1, 3, 4, 5, 9, 10), 0x7F
# The name of a thread and of memory.
_PRCTL = (15, 16, 0x53564D41)
_UNIX, _STREAM, _SOCKET_KIND = 1, 1, 0xF

Step = tuple[int, int, int, int]
"""An instruction: code, jump if true, jump if false, operand."""
Check = tuple[int, int, Sequence[int]]
"""An argument's word (twice its index, plus one for the upper half), a bit mask, and the values allowed under it."""


def restrict() -> None:
    """Filter the calls of this process and of all its threads to come. Raises OSError where the kernel refuses."""
    steps = program(os.uname().machine, os.getpid())
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    header = struct.pack("@HP", len(steps), ctypes.addressof(code))
    linux.prctl(linux.PR_SET_SECCOMP, ctypes.c_char_p(header))


def program(machine: str, me: int) -> list[Step]:
    """The filter for a process with id `me` in its PID namespace. Raises OSError for an unknown machine."""
    if machine not in _MACHINES:
        raise OSError(
            _ENOSYS, f"seccomp: the machine is {machine}, call numbers are known only for {' and '.join(_MACHINES)}"
        )
    which, name = _MACHINES[machine]
    filtered = {each: numbers[which] for each, numbers in FILTERED.items()}
    steps: list[Step] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, name),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for number in _numbers(ALLOWED.values(), which):
        steps += _when(number, [(_RETURN, 0, 0, _ALLOW)])
    for call, checks in _filters(me).items():
        for check in checks:
            steps += _when(filtered[call], _allowed_if(check))
    for *numbers, error in ANSWERED.values():
        if (answered := numbers[which]) is not None:
            steps += _when(answered, [(_RETURN, 0, 0, _ERRNO | error)])
    # Those of x86-64's other half, too, which begin at 0x40000000.
    return [*steps, (_JUMP_ABOVE, 0, 1, NEWEST), (_RETURN, 0, 0, _ERRNO | _ENOSYS), (_RETURN, 0, 0, _ERRNO | _EPERM)]


def _filters(me: int) -> dict[str, list[list[Check]]]:
    """For each call its alternatives: the call is allowed if all checks of one alternative hold."""
    every = _ALL_BITS
    return {
        "clone": [[(0, every & ~_DETACHED, [_THREAD])]],
        "kill": [[(0, every, [me])]],
        "tgkill": [[(0, every, [me])]],
        "fcntl": [[(2, every, _FCNTL)], [(2, every, [_F_SETFL]), (4, _O_ASYNC, [0])]],
        "ioctl": [[(2, every, _IOCTL)]],
        "mmap": [[(6, _MAP_HUGETLB, [0])]],
        "futex": [[(2, _FUTEX_COMMAND, _FUTEX)]],
        "socketpair": [[(0, every, [_UNIX]), (2, _SOCKET_KIND, [_STREAM])]],
        "sendto": [[(8, every, [0]), (9, every, [0])]],  # to nobody but the other end
        "prlimit64": [[(0, every, [0]), (4, every, [0]), (5, every, [0])]],  # its own, to read
        "prctl": [[(0, every, _PRCTL)]],
        "sched_getaffinity": [[(0, every, [0, me])]],
    }


def _allowed_if(checks: Sequence[Check]) -> list[Step]:
    """Allows the call if all checks hold; otherwise continues with the next rule."""
    parts: list[Step] = []
    for word, bits, values in reversed(checks):
        rest = parts or [(_RETURN, 0, 0, _ALLOW)]
        # A comparison that holds jumps over the remaining comparisons and over the jump to the next rule.
        compared = [(_JUMP_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
        next_rule: Step = (_JUMP, 0, 0, len(rest))
        masked: list[Step] = [(_AND, 0, 0, bits)] if bits != _ALL_BITS else []
        parts = [(_LOAD, 0, 0, _ARGUMENTS + 4 * word), *masked, *compared, next_rule, *rest]
    return parts


def _when(number: int, then: list[Step]) -> list[Step]:
    """`then` for call `number`, whose number is loaded; it is loaded again after."""
    if len(then) == 1:
        return [(_JUMP_EQUAL, 0, 1, number), *then]
    assert len(then) < _MAX_JUMP
    return [(_JUMP_EQUAL, 0, len(then) + 1, number), *then, (_LOAD, 0, 0, _NUMBER)]


def _numbers(pairs: Iterable[tuple[int | None, int | None]], which: int) -> list[int]:
    return sorted(number for pair in pairs if (number := pair[which]) is not None)
