"""Run as a program of its own: gives up what a process may do, for good, and then runs the Python it is sent.

Needs nothing but the standard library, for it runs before anything may be imported. The job is JSON on a descriptor;
standard input, output and error are the program's. Four walls, each of which stands by itself:

- rlimits: address space (and so threads, by their stacks), CPU, file sizes, descriptors, no core files;
- capabilities and the way back to them are dropped, also where this runs as root;
- Landlock (Linux 5.13): files are readable where Python's own are, and writable in the working directory alone, where
  no other can be made;
- seccomp: no process but threads, no program, no socket, no signal to another, and none of what makes memory that no
  rlimit counts or goes round the other walls.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Mapping
from typing import Any

REFUSED = 121
"""The exit status where a wall cannot be put up; standard error says which."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_CAP_AMBIENT = 1, 38, 22, 47
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522

# Landlock's calls have the same numbers everywhere (linux/landlock.h).
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 1 << 1, 1 << 2, 1 << 3
_REMOVE_FILE, _MAKE_FILE, _TRUNCATE = 1 << 5, 1 << 8, 1 << 14
_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/zero", "/dev/urandom")

# Seccomp: numbers by machine, x86_64 and aarch64 (None: there is none such).
_DENIED: Mapping[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "setrlimit": (160, 164), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "io_uring_setup": (425, 425), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_by_handle_at":
    (304, 265), "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104), "reboot": (169, 142),
    "swapon": (167, 224), "acct": (163, 89), "setsid": (112, 157), "setpgid": (109, 154),
}  # fmt: skip
_CLONE, _CLONE3, _KILL, _TGKILL, _PRLIMIT = (56, 220), (435, 435), (62, 129), (234, 131), (302, 261)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Which of the numbers, and how seccomp calls the machine."""
_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_CLONE_THREAD = 0x00010000


def confine(limits: Mapping[str, int], folder: str) -> None:
    """Put up all walls around this process; `folder` is where it may write. Raises OSError where one cannot be had."""
    for name, value in limits.items():
        _lower(getattr(resource, f"RLIMIT_{name}"), value)
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _allow_files([*_READABLE, sys.prefix, sys.base_prefix], folder)
    _drop_capabilities()
    _filter_calls()


def _lower(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _drop_capabilities() -> None:
    header, nothing = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _check(_LIBC.syscall(_CAPSET[os.uname().machine], header, nothing), "capset")


def _allow_files(readable: Iterable[str], writable: str) -> None:
    abi = _LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    _check(abi, "Landlock")
    every = _RIGHTS_BY_ABI[min(abi, max(_RIGHTS_BY_ABI))]
    attributes = struct.pack("<Q", every)
    ruleset = _LIBC.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    _check(ruleset, "Landlock")
    for path in filter(os.path.exists, readable):
        rights = _EXECUTE | _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        _allow(ruleset, path, rights)
    _allow(ruleset, "/dev/null", _READ_FILE | _WRITE_FILE)
    _allow(ruleset, writable, _WRITE_FILE | _READ_FILE | _READ_DIR | every & (_REMOVE_FILE | _MAKE_FILE | _TRUNCATE))
    _check(_LIBC.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint(0)), "Landlock")
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("<Qi", rights, parent)
    _check(_LIBC.syscall(_ADD_RULE, ruleset, ctypes.c_int(1), rule, ctypes.c_uint(0)), f"Landlock for {path}")
    os.close(parent)


def _filter_calls() -> None:
    which, machine = _MACHINES[os.uname().machine]
    denied = [number for numbers in _DENIED.values() if (number := numbers[which]) is not None]
    me = os.getpid()
    program = [
        *_unless(_ARCH, _JUMP_EQUAL, machine, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        *((_JUMP_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _ERRNO | _EPERM)),  # the other half of x86-64's calls
        *(step for number in denied for step in _when(number, [(_RETURN, 0, 0, _ERRNO | _EPERM)])),
        # Its flags are behind a pointer; libc does with clone where it does not exist.
        *_when(_CLONE3[which], [(_RETURN, 0, 0, _ERRNO | _ENOSYS)]),
        *_when(_CLONE[which], _unless(_ARGUMENTS, _JUMP_SET, _CLONE_THREAD, _ERRNO | _EPERM)),
        *_when(_KILL[which], _unless(_ARGUMENTS, _JUMP_EQUAL, me, _ERRNO | _EPERM)),
        *_when(_TGKILL[which], _unless(_ARGUMENTS, _JUMP_EQUAL, me, _ERRNO | _EPERM)),
        *_when(_PRLIMIT[which], [step for half in (0, 4) for step in _unset(_ARGUMENTS + 16 + half)]),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("<HBBI", *step) for step in program)
    filters = ctypes.create_string_buffer(code)
    header = struct.pack("@HP", len(program), ctypes.addressof(filters))
    _check(_LIBC.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(header), 0, 0), "seccomp")


Step = tuple[int, int, int, int]
"""An instruction: code, jump if true, jump if false, operand."""


def _when(number: int, then: list[Step]) -> list[Step]:
    """`then`, which ends or falls through, for call `number`, whose number is loaded; it is loaded again after."""
    return [(_JUMP_EQUAL, 0, len(then) + 1, number), *then, (_LOAD, 0, 0, _NUMBER)]


def _unless(offset: int, test: int, value: int, verdict: int) -> list[Step]:
    """`verdict`, unless the word at `offset` passes the test."""
    return [(_LOAD, 0, 0, offset), (test, 1, 0, value), (_RETURN, 0, 0, verdict)]


def _unset(offset: int) -> list[Step]:
    return _unless(offset, _JUMP_EQUAL, 0, _ERRNO | _EPERM)


def _check(result: int, wall: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{wall}: {os.strerror(ctypes.get_errno())}")


def main(parent: int, source: int, ready: int) -> None:
    """Read the job from descriptor `source`, confine this process, close descriptor `ready`, run the program.

    It ends with `parent`, however that does.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    with open(source, encoding="utf-8") as opened:
        job: dict[str, Any] = json.load(opened)
    try:
        confine(job["limits"], os.getcwd())
    except (OSError, KeyError) as error:
        print(f"this machine cannot confine a program: {error}", file=sys.stderr)
        os._exit(REFUSED)
    os.close(ready)
    # The program sees no more of this file than it would of any other.
    exec(compile(job["program"], "<program>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
