"""The worker pool of a portable job whose steps run in the process that submits it (Beam's LOOPBACK environment).

A runner requests workers from the pool, and a worker runs the code that it is sent. Beam's protocol has no
authentication, so a client that reaches the pool can run code here. Beam's own pool listens on all interfaces; this
one listens on loopback.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions
from apache_beam.portability.api import beam_fn_api_pb2_grpc
from apache_beam.runners.worker.worker_pool_main import BeamFnExternalWorkerPoolServicer

HOST = "127.0.0.1"
_STOP_S = 1.0
_CHANNEL = (("grpc.http2.max_pings_without_data", 0), ("grpc.http2.max_ping_strikes", 0), ("grpc.so_reuseport", 0))


@contextmanager
def local_worker_pool(options: Sequence[str]) -> Iterator[list[str]]:
    """Replace LOOPBACK in `options` by a pool in this process, which ends with the context; else yield `options`.

    Raises OSError if no loopback port is free.
    """
    if PipelineOptions(list(options)).view_as(PortableOptions).environment_type != "LOOPBACK":
        yield list(options)
        return
    server = grpc.server(ThreadPoolExecutor(4, "worker pool"), options=_CHANNEL)
    beam_fn_api_pb2_grpc.add_BeamFnExternalWorkerPoolServicer_to_server(
        BeamFnExternalWorkerPoolServicer(data_buffer_time_limit_ms=0), server
    )
    port = server.add_insecure_port(f"{HOST}:0")
    if not port:
        raise OSError(f"there is no free port on {HOST} for Beam's worker pool")
    server.start()
    try:
        # If an option is given twice, the last one is used.
        yield [*options, "--environment_type=EXTERNAL", f"--environment_config={HOST}:{port}"]
    finally:
        server.stop(_STOP_S).wait()
