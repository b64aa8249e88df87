"""In a program's process: restricts the process permanently, then runs the Python program that it received.

Four layers, each independent of the others (the zygote adds namespaces before them):

- rlimits: address space, CPU, sizes of files, threads, descriptors, no core files;
- no capabilities, and no way to regain them, also where this runs as root;
- Landlock: the program reads where Python's files and the system's libraries are and writes in its working folder
  alone, in which it creates no folder; with ABI 6 signals and abstract sockets cannot leave its domain;
- seccomp: only the calls of allowed_calls.py, which start threads but no process, no executable and no connection.

Imports nothing but the standard library.
"""

from __future__ import annotations

import atexit
import resource
import sys
import threading
import traceback
import types
from collections.abc import Mapping, Sequence

from infra.sandbox import landlock, linux, seccomp


def confine(limits: Mapping[str, int], readable: Sequence[str], writable: str, abi: int) -> None:
    """Apply all layers to this process. Raises OSError where the kernel lacks one."""
    for name, value in limits.items():
        _lower(getattr(resource, f"RLIMIT_{name}"), value)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    landlock.restrict(readable, writable, abi)
    linux.drop_capabilities()
    seccomp.restrict()


def run(source: str) -> int:
    """Run the program `source` as `__main__` until its threads have ended, and return its exit status.

    Errors go to standard error. The program's variables contain nothing of the caller.
    """
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.argv = [""]
    status = 0
    try:
        exec(compile(source, "<program>", "exec"), module.__dict__)
    except SystemExit as ending:
        status = _status(ending)
    except BaseException as error:  # noqa: BLE001 - a program may raise anything
        _show(error)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    return status if _flush() else status or 120


def _status(ending: SystemExit) -> int:
    if ending.code is None or isinstance(ending.code, int):
        return (ending.code or 0) & 0xFF
    print(ending.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """The traceback, from the program's own first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _flush() -> bool:
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except (OSError, ValueError):
        return False
    return True


def _lower(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))
