"""A job server of this process's own: what starts it, and that it ends with whoever needs it."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from infra.kafka.broker import HOST, free_port, port_is_free
from infra.listening import exposed_addresses, listening_sockets
from infra.processes import is_running, spawn, stop_process

ALLOW_VARIABLE = "LAMINAR_ALLOW_EXPOSED_RUNNERS"
"""Set to anything: job servers may listen on all interfaces."""
_WORKER = "run_worker_"
"""How Beam begins the names of the threads in which a process runs its own job's steps (LOOPBACK)."""
_WORKERS_END_S = 2.0


class ExposedServer(RuntimeError):
    """A job server that other machines reach: it asks nobody who they are, and runs what it is told to."""


def reject_exposed_server(what: str, addresses: Sequence[str]) -> None:
    """Raise ExposedServer where the job server `what` listens at `addresses`, unless the user accepts that."""
    if addresses and not os.environ.get(ALLOW_VARIABLE):
        raise ExposedServer(
            f"the job server of {what} listens at {', '.join(addresses)}: it has no authentication, so whoever can "
            f"connect can run code on this machine. If a container or a firewall blocks other machines, set "
            f"{ALLOW_VARIABLE}=1; otherwise use --runner embedded"
        )


@contextmanager
def running_server(what: str, command: Callable[[int, Path], list[str]], start_s: float) -> Iterator[str]:
    """The job endpoint, `host:port`, of what `command` starts for a port and an empty folder.

    The kernel ends it with this process: Beam starts one too, but leaves it behind when the submitting process is
    killed. Raises RuntimeError where it does not come up in `start_s` seconds, ExposedServer where it listens on more
    than loopback, unless `ALLOW_VARIABLE` is set.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix=f"laminar-{what.lower()}-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "server.log"
        process = spawn(command(port, Path(folder)), log, die_with_parent=True)
        try:
            deadline = time.monotonic() + start_s
            while port_is_free(port):
                if not is_running(process) or time.monotonic() > deadline:
                    raise RuntimeError(f"{what} did not come up: {log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.02)
            reject_exposed_server(what, exposed_addresses(listening_sockets([process])))
            yield f"{HOST}:{port}"
        finally:
            _let_workers_end()
            stop_process(process, timeout=2.0)


def _let_workers_end() -> None:
    # A server says that a job has ended before it has told the job's workers, which are threads of ours that would call
    # its sudden end a failure.
    deadline = time.monotonic() + _WORKERS_END_S
    for thread in threading.enumerate():
        if thread.name.startswith(_WORKER):
            thread.join(max(0.0, deadline - time.monotonic()))
