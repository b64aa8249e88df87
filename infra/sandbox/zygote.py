"""A process that starts Python once and forks a confined child for each program: a fork is cheaper than a start.

It is single-threaded, imports nothing but the standard library, and never holds a program or its input, which go from
the supervisor to the child through pipes. Each program has two processes:

    supervisor --control--> zygote --fork--> monitor --fork--> program

The monitor is not confined. It reports to the supervisor how the program ended, and kills the program when the
supervisor closes its end of the status socket. When the supervisor's end of the control socket is closed, because the
supervisor exited or was killed, the zygote exits; its monitors die with it, and their programs with them.

Messages are JSON, one a packet:

- zygote to supervisor, once: `{"namespaces": bool, "abi": n}` or `{"refused": why}`;
- supervisor to zygote, for each program, with descriptors (status, job, and the program's 0, 1, 2, 3, ...):
  `{"limits": {...}, "disk_bytes": n, "folder": path}`, in which `folder` is empty where there are namespaces; with
  `"cgroup": true` the last descriptor is the cgroup.procs to enter;
- monitor to supervisor through `status`: `{"pid": n}`; from the child `{"ready": true}` or `{"refused": why}`; at the
  end `{"ended": status, "full": bool}`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from infra.sandbox import confine, landlock, linux, remote
from infra.sandbox.namespaces import WORK, Jail, work_is_full

_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
_READABLE = (*_LIBRARIES, "/usr/share", "/etc/localtime", "/dev/zero", "/dev/urandom")
_SYSTEM = ("/usr", "/usr/local")
"""Prefixes of a system's Python, whose files are among the libraries. Users have their own in src, app and others."""
_MAX_DESCRIPTORS = 8
_MAX_MESSAGE_BYTES = 4096
_FIRST_FREE_DESCRIPTOR = 64
"""Descriptors from here on are free in a child."""
REMOTE = "laminar_remote"
"""The name under which a program imports infra.sandbox.remote."""
_PRELOADED = ("bisect", "collections", "functools", "heapq", "itertools", "math", "random", "re", "string")
"""Modules that many programs import."""


@dataclass(frozen=True)
class _Layers:
    """The isolation that this zygote applies: its namespaces, the paths that programs may read, and Landlock's ABI."""

    jail: Jail | None
    readable: Sequence[str]
    abi: int


def main(control_descriptor: int, namespaces: bool, newest_abi: int) -> None:
    """Serve the supervisor until it closes the control socket. `newest_abi` bounds the ABI of Landlock that is used."""
    control = socket.socket(fileno=control_descriptor)
    for name in _PRELOADED:
        __import__(name)
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if soft != hard:  # a verifier sets it for one call; this process serves many
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    readable = [*_READABLE, *sorted({sys.base_prefix, sys.prefix}.difference(_SYSTEM))]
    sys.path[:] = [each for each in sys.path if any(each.startswith(prefix) for prefix in readable)]
    abi = min(landlock.newest_abi(), newest_abi)
    refusal = landlock.unsupported_reason(abi)
    jail = None
    try:
        if not refusal and namespaces:
            jail = Jail(readable)
    except OSError as error:
        refusal = f"namespaces: {error}"
    hello = {"refused": refusal} if refusal else {"namespaces": namespaces, "abi": abi}
    control.send(json.dumps(hello).encode())
    if not refusal:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # monitors are not waited for
        gc.freeze()
        _serve(control, _Layers(jail, readable, abi))


def _serve(control: socket.socket, layers: _Layers) -> None:
    zygote = os.getpid()
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
        if not request:
            return
        # Where the fork fails the supervisor sees the status socket closed.
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                control.close()
                _run_monitor(zygote, json.loads(request), descriptors, layers)
        for each in descriptors:
            os.close(each)


def _run_monitor(zygote: int, job: Mapping[str, Any], descriptors: Sequence[int], layers: _Layers) -> NoReturn:
    """Run the monitor: start the program, kill it at the supervisor's request, report how it ended."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:
            os._exit(0)
        status = socket.socket(fileno=descriptors[0])
        try:
            pid = _start(job, descriptors, layers)
        except OSError as error:
            _report(status, {"refused": str(error)})
            os._exit(0)
        _report(status, {"pid": pid})
        ended = os.pidfd_open(pid)
        ready, _, _ = select.select([ended, status.fileno()], [], [])
        if ended not in ready:
            os.kill(pid, signal.SIGKILL)
        _, code = os.waitpid(pid, 0)
        full = layers.jail is not None and work_is_full()
        _report(status, {"ended": os.waitstatus_to_exitcode(code), "full": full})
    finally:
        os._exit(0)


def _start(job: Mapping[str, Any], descriptors: Sequence[int], layers: _Layers) -> int:
    if job.get("cgroup"):
        *descriptors, cgroup_procs = descriptors
        os.write(cgroup_procs, b"0")
        os.close(cgroup_procs)
    if layers.jail:
        layers.jail.enter_nested(job["disk_bytes"])
    else:
        os.chdir(job["folder"])
    monitor_alive, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(held)
        _become_program(job, descriptors, monitor_alive, layers)
    for each in (monitor_alive, *descriptors[1:]):
        os.close(each)
    return pid


def _become_program(
    job: Mapping[str, Any], descriptors: Sequence[int], monitor_alive: int, layers: _Layers
) -> NoReturn:
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if select.select([monitor_alive], [], [], 0)[0]:  # its other end is closed: the monitor died before
            os._exit(0)
        os.setsid()
        source, status = _arrange(descriptors)
        folder = WORK if layers.jail else str(job["folder"])
        for name in ("HOME", "TMPDIR"):
            os.environ[name] = folder
        try:
            confine.confine(job["limits"], layers.readable, folder, layers.abi)
        except (OSError, ValueError, TypeError, OverflowError) as error:  # the kernel, or Python, takes no such limit
            os.write(status, json.dumps({"refused": str(error)}).encode())
            os._exit(1)
        os.write(status, b'{"ready": true}')
        os.close(status)
        for name in [each for each in sys.modules if each.split(".")[0] == "infra"]:
            del sys.modules[name]
        sys.modules[REMOTE] = remote
        gc.unfreeze()
        os._exit(confine.run(source))
    except BaseException:  # noqa: BLE001 - a program may have changed this interpreter
        os._exit(1)


def _arrange(descriptors: Sequence[int]) -> tuple[str, int]:
    """Move the program's descriptors to 0, 1, ... and close all but those and the status, which comes after them.

    Returns the program's source and the status.
    """
    status, job, *passed = descriptors
    with open(job, encoding="utf-8", closefd=False) as opened:
        source = str(json.load(opened))
    moved = [os.dup2(each, _FIRST_FREE_DESCRIPTOR + index) for index, each in enumerate([*passed, status])]
    for index, each in enumerate(moved):
        os.dup2(each, index)
    os.closerange(len(moved), 1 << 20)
    return source, len(moved) - 1


def _report(status: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the supervisor is gone
        status.send(json.dumps(message).encode())
