"""Job servers: one as a child process, which ends with this process, and the wait until any accepts connections."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions
from apache_beam.portability.api import beam_job_api_pb2, beam_job_api_pb2_grpc

from infra.kafka.broker import HOST, free_port, port_is_free
from infra.listening import exposed_addresses, listening_sockets
from infra.processes import is_running, spawn, stop_process
from infra.runners.stopping import STOPPING
from infra.scratch import scratch_folder

ALLOW_VARIABLE = "LAMINAR_ALLOW_EXPOSED_RUNNERS"
"""Environment variable: if it is set, job servers may listen on all interfaces."""
_WORKER_PREFIX = "run_worker_"
"""Prefix of the names of Beam's threads that run a job's steps in this process (LOOPBACK)."""
_WORKERS_TIMEOUT_S = 2.0


class ExposedServer(RuntimeError):
    """A job server without authentication that other machines can reach and use to run code here."""


def reject_exposed_server(what: str, addresses: Sequence[str]) -> None:
    """Raise ExposedServer if the job server `what` listens at `addresses`, unless the user has allowed that."""
    if addresses and not os.environ.get(ALLOW_VARIABLE):
        raise ExposedServer(
            f"the job server of {what} listens at {', '.join(addresses)}: it has no authentication, so any client "
            f"that can connect can run code on this machine. If a container or a firewall blocks other machines, set "
            f"{ALLOW_VARIABLE}=1; otherwise use --runner embedded"
        )


@contextmanager
def running_server(what: str, command: Callable[[int, Path], list[str]], start_s: float) -> Iterator[str]:
    """Start `command(port, folder)`, with a free port and an empty folder, and yield its job endpoint, `host:port`.

    The kernel ends it with this process; a server that Beam starts itself would survive a killed submitter. Raises
    RuntimeError if it does not start within `start_s` seconds, and ExposedServer if it listens on more than loopback,
    unless `ALLOW_VARIABLE` is set.
    """
    port = free_port()
    with scratch_folder(f"laminar-server-{what.lower()}-") as folder:
        log = folder / "server.log"
        process = spawn(command(port, folder), log, die_with_parent=True)
        try:
            deadline = time.monotonic() + start_s
            while port_is_free(port):
                if not is_running(process) or time.monotonic() > deadline:
                    raise RuntimeError(f"{what} did not start: {log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.02)
            opened = listening_sockets([process, *process.children(recursive=True)])
            reject_exposed_server(what, exposed_addresses(opened))
            yield f"{HOST}:{port}"
        finally:
            _join_worker_threads()
            stop_process(process, timeout=2.0)


def _join_worker_threads() -> None:
    # A server reports the end of a job before it notifies the job's workers. They are threads of this process and would
    # report a failure if the server ended first.
    deadline = time.monotonic() + _WORKERS_TIMEOUT_S
    for thread in threading.enumerate():
        if thread.name.startswith(_WORKER_PREFIX):
            thread.join(max(0.0, deadline - time.monotonic()))


START_TIMEOUT_S = 60.0
"""Seconds that a job server may take to start. Beam's own limit, `--job_server_timeout`, also limits the job."""
_ANSWER_S, _PAUSE_S = 1.0, 0.1
_NO_ANSWER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
_EMBEDDED = "embed"


class NoJobServer(RuntimeError):
    """No job server responds."""


def wait_for_job_server(options: PipelineOptions) -> bool:
    """Wait for the job server in `options`, if any; return False if `STOPPING` is set first.

    Raises NoJobServer after `START_TIMEOUT_S` seconds, or `--job_server_timeout` where that is less.
    """
    portable = options.view_as(PortableOptions)
    endpoint, timeout_s = portable.job_endpoint, min(START_TIMEOUT_S, portable.job_server_timeout)
    if not endpoint or endpoint == _EMBEDDED:
        return True
    deadline = time.monotonic() + timeout_s
    # `grpc.channel_ready_future` would leave a thread behind that fails once the channel is closed.
    with grpc.insecure_channel(endpoint) as channel:
        jobs = beam_job_api_pb2_grpc.JobServiceStub(channel)
        while time.monotonic() < deadline and not STOPPING.is_set():
            try:
                jobs.GetJobs(beam_job_api_pb2.GetJobsRequest(), timeout=_ANSWER_S, wait_for_ready=True)
            except grpc.RpcError as error:
                if error.code() in _NO_ANSWER:
                    STOPPING.wait(_PAUSE_S)
                    continue
            return True
    if STOPPING.is_set():
        return False
    raise NoJobServer(f"no job server responds at {endpoint} after {timeout_s:g} s: set --job_endpoint to its address")
