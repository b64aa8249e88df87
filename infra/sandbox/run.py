"""Run untrusted Python, such as a model's answer, within bounds on time, memory, disk and output.

Each program runs in a process of its own, forked by a zygote (zygote.py), with nothing of this process's environment or
memory and an empty working folder (confine.py lists the layers of isolation; docs/security.md has the threat model).
Requires Linux 6.2; elsewhere it raises SandboxUnavailable.
"""

from __future__ import annotations

import contextlib
import select
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import TypeVar

from infra.sandbox.running import LOOK_EVERY_S, Ending, Limits, Ran, Running, ZygoteDied
from infra.sandbox.zygotes import ZYGOTES, Isolation, SandboxUnavailable, Zygote

__all__ = ["Ending", "Isolation", "Limits", "Ran", "SandboxUnavailable", "run_python"]

_ATTEMPTS = 3
T = TypeVar("T")


def run_python(
    program: str, given: bytes = b"", limits: Limits | None = None, isolation: Isolation | None = None
) -> Ran:
    """Run `program` with `given` on its standard input, and wait until nothing of it is left.

    Uses the strongest isolation that this machine has, unless `isolation` is given. Raises SandboxUnavailable where the
    program cannot be confined; nothing that the program does raises.
    """
    return _with_zygote(isolation, lambda zygote: _run_one(zygote, program, given, limits or Limits()))


def run_pair(server: str, client: str, limits: Limits, isolation: Isolation | None = None) -> Ran:
    """Run two programs at once, each in a sandbox of its own, and return what `client` did; `server` ends with it.

    Descriptor 3 of each is an end of a stream between them (remote.py). Both have these limits. Raises
    SandboxUnavailable.
    """
    return _with_zygote(isolation, lambda zygote: _run_two(zygote, server, client, limits))


def _run_two(zygote: Zygote, server: str, client: str, limits: Limits) -> Ran:
    with contextlib.ExitStack() as stack:
        running = []
        for program, end in zip((server, client), socket.socketpair(), strict=True):
            stack.callback(end.close)
            each = Running(zygote, stack.enter_context(_folder(zygote)), program, b"", limits, [end.fileno()])
            stack.callback(each.close)
            running.append(each)
            end.close()  # its child has it: the other reads its end when that ends
        server_ended = None
        while (ended := running[1].step(0)) is None:
            if server_ended is None and (server_ended := running[0].step(0)) is not None:
                running[0].close()
            waiting = running if server_ended is None else running[1:]
            select.select(waiting, [], [], LOOK_EVERY_S)
        running[1].close()
        return running[1].result(ended)


def _run_one(zygote: Zygote, program: str, given: bytes, limits: Limits) -> Ran:
    with _folder(zygote) as folder:
        running = Running(zygote, folder, program, given, limits)
        try:
            while (ended := running.step(LOOK_EVERY_S)) is None:
                pass
        finally:
            running.close()
        return running.result(ended)


def _with_zygote(isolation: Isolation | None, run: Callable[[Zygote], T]) -> T:
    """Call `run` with a zygote, and again with a new one where that dies: a killed program leaves nothing behind."""
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
    """The working folder of a program without a file system of its own."""
    if zygote.namespaces:
        yield ""
    else:
        with tempfile.TemporaryDirectory(prefix="laminar-sandbox-", ignore_cleanup_errors=True) as folder:
            yield folder
