"""Run untrusted Python, such as a model's answer, within bounds on time, memory, disk and output.

Each program runs in a process of its own, forked by a zygote (zygote.py), with nothing of this process's environment or
memory and an empty working folder (confine.py lists the layers of isolation; docs/security.md has the threat model).
Requires Linux 6.2; elsewhere it raises SandboxUnavailable.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Iterator
from typing import TypeVar

from infra.sandbox.running import MEASURE_EVERY_S, Limits, ProgramResult, Running, ZygoteDied
from infra.sandbox.zygotes import PROGRAM_FOLDERS, ZYGOTES, Isolation, SandboxUnavailable, Zygote
from infra.scratch import locked_folder

__all__ = ["Isolation", "Limits", "ProgramResult", "SandboxUnavailable", "run_python"]

_ATTEMPTS = 3
T = TypeVar("T")


def run_python(
    program: str, stdin: bytes = b"", limits: Limits | None = None, isolation: Isolation | None = None
) -> ProgramResult:
    """Run `program` with `stdin` as its standard input, and wait until it has ended completely.

    Uses the strongest isolation that this machine has, unless `isolation` is stdin. Raises SandboxUnavailable where the
    program cannot be confined; nothing that the program does raises.
    """
    return _with_zygote(isolation, lambda zygote: _run_one(zygote, program, stdin, limits or Limits()))


def run_pair(server: str, client: str, limits: Limits) -> ProgramResult:
    """Run two programs at once, each in a sandbox of its own, and return what `client` did; `server` ends with it.

    Descriptor 3 of each is an end of a stream between them (remote.py). Both have these limits. Raises
    SandboxUnavailable.
    """
    return _with_zygote(None, lambda zygote: _run_two(zygote, server, client, limits))


def _run_two(zygote: Zygote, server: str, client: str, limits: Limits) -> ProgramResult:
    with contextlib.ExitStack() as stack:
        running = []
        for program, end in zip((server, client), socket.socketpair(), strict=True):
            stack.callback(end.close)
            each = Running(zygote, stack.enter_context(_folder(zygote)), program, b"", limits, [end.fileno()])
            stack.callback(each.close)
            running.append(each)
            end.close()  # the child holds it: the other program reads end-of-file when the child ends
        server_ended = None
        while (ended := running[1].step(0)) is None:
            if server_ended is None and (server_ended := running[0].step(0)) is not None:
                running[0].close()
            waiting = running if server_ended is None else running[1:]
            select.select(waiting, [], [], MEASURE_EVERY_S)
        running[1].close()
        return running[1].result(ended)


def _run_one(zygote: Zygote, program: str, stdin: bytes, limits: Limits) -> ProgramResult:
    with _folder(zygote) as folder:
        running = Running(zygote, folder, program, stdin, limits)
        try:
            while (ended := running.step(MEASURE_EVERY_S)) is None:
                pass
        finally:
            running.close()
        return running.result(ended)


def _with_zygote(isolation: Isolation | None, run: Callable[[Zygote], T]) -> T:
    """Call `run` with a zygote; if that dies, repeat with a new one, since a killed program leaves no effects."""
    for _ in range(_ATTEMPTS):
        zygote = ZYGOTES.get(isolation)
        try:
            return run(zygote)
        except ZygoteDied:
            ZYGOTES.replace(zygote)
    raise SandboxUnavailable(
        f"the sandbox's processes were killed in {_ATTEMPTS} attempts: look for the OOM killer in the kernel's log"
    )


@contextlib.contextmanager
def _folder(zygote: Zygote) -> Iterator[str]:
    """The working folder of a program; empty if the zygote gives it its own file system."""
    if zygote.namespaces:
        yield ""
    else:
        with locked_folder(PROGRAM_FOLDERS) as folder:
            yield str(folder)
