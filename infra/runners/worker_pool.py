"""Worker pools of portable jobs: one in the process that submits a job (Beam's LOOPBACK environment), and one beside a
task manager (EXTERNAL): `python -m infra.runners.worker_pool PORT`.

A runner requests workers from the pool, and a worker runs the code that it is sent. Beam's protocol has no
authentication, so a client that reaches the pool can run code here. Beam's own pools listen on all interfaces; these
listen on loopback.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions
from apache_beam.portability.api import beam_fn_api_pb2 as fn_api
from apache_beam.portability.api import beam_fn_api_pb2_grpc
from apache_beam.runners.worker.worker_pool_main import BeamFnExternalWorkerPoolServicer

from infra.processes import die_with_parent_command
from infra.runners.stopping import STOPPING, stop_on_signals
from infra.runners.worker import CLOSE_S, DRAIN_S

HOST = "127.0.0.1"
_STOP_S = 1.0
_WORKERS_S = 2.0 + DRAIN_S + CLOSE_S
"""Seconds in which workers notice that their task manager ends, and end."""
_CHANNEL = (("grpc.http2.max_pings_without_data", 0), ("grpc.http2.max_ping_strikes", 0), ("grpc.so_reuseport", 0))


@contextmanager
def local_worker_pool(options: Sequence[str]) -> Iterator[list[str]]:
    """Replace LOOPBACK in `options` by a pool in this process, which ends with the context; else yield `options`.

    Raises OSError if no loopback port is free.
    """
    if PipelineOptions(list(options)).view_as(PortableOptions).environment_type != "LOOPBACK":
        yield list(options)
        return
    with _serving(BeamFnExternalWorkerPoolServicer(data_buffer_time_limit_ms=0), 0) as port:
        # If an option is given twice, the last one is used.
        yield [*options, "--environment_type=EXTERNAL", f"--environment_config={HOST}:{port}"]


@contextmanager
def _serving(pool: Any, port: int) -> Iterator[int]:
    """Serve `pool` at `port` (0: a free one) of loopback; the context value is the port. Raises OSError."""
    server = grpc.server(ThreadPoolExecutor(4, "worker pool"), options=_CHANNEL)
    beam_fn_api_pb2_grpc.add_BeamFnExternalWorkerPoolServicer_to_server(pool, server)
    try:
        bound = server.add_insecure_port(f"{HOST}:{port}")
    except RuntimeError as error:
        raise OSError(f"Beam's worker pool cannot listen at {HOST}:{port}: {error}") from error
    if not bound:
        raise OSError(f"there is no free port on {HOST} for Beam's worker pool")
    server.start()
    try:
        yield bound
    finally:
        server.stop(_STOP_S).wait()


class WorkerProcesses:
    """Starts a process for each worker that a runner requests, see `worker`. All end with this process.

    A worker ends when its task manager closes the connection. The request to stop it is not used: it has only the
    worker's number, and several task managers that share a pool give the same numbers.
    """

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []

    def StartWorker(self, request: fn_api.StartWorkerRequest, _: object) -> fn_api.StartWorkerResponse:
        """Start the worker, with the runner's address and its number."""
        self._running = [each for each in self._running if each.poll() is None]
        words = [request.control_endpoint.url, request.worker_id]
        command = [sys.executable, "-P", "-m", "infra.runners.worker", *words]
        try:
            self._running.append(subprocess.Popen(die_with_parent_command(command)))
        except OSError as error:
            return fn_api.StartWorkerResponse(error=f"worker {request.worker_id} cannot be started: {error}")
        return fn_api.StartWorkerResponse()

    def wait(self, timeout_s: float) -> None:
        """Wait until all workers have ended, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for each in self._running:
            with suppress(subprocess.TimeoutExpired):
                each.wait(max(0.0, deadline - time.monotonic()))

    def StopWorker(self, request: fn_api.StopWorkerRequest, _: object) -> fn_api.StopWorkerResponse:
        """Confirm the request."""
        return fn_api.StopWorkerResponse()


def main(port: int) -> None:
    """Serve a pool of worker processes until SIGTERM.

    The end of a pod or a machine sends it to the task manager, too: the workers then commit their last outputs.
    """
    stop_on_signals()
    pool = WorkerProcesses()
    with _serving(pool, port) as bound:
        print(f"--environment_type=EXTERNAL --environment_config=localhost:{bound}", flush=True)
        STOPPING.wait()
    pool.wait(_WORKERS_S)


if __name__ == "__main__":
    main(int(sys.argv[1]))
