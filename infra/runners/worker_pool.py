"""The worker pool of a portable job whose steps run in the process that submits it (Beam's LOOPBACK environment).

A runner asks the pool to start workers, and a worker does what it is sent: whoever reaches the pool can run code here,
for Beam's protocol has no authentication. Beam's own pool listens on all interfaces; this one listens on loopback.
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
    """`options` with LOOPBACK replaced by a pool of this process, which ends with the context; else as they are.

    Raises OSError where no port on loopback is free.
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
        raise OSError(f"Beam's worker pool finds no free port on {HOST}")
    server.start()
    try:
        # Of an option that is given twice the last one counts.
        yield [*options, "--environment_type=EXTERNAL", f"--environment_config={HOST}:{port}"]
    finally:
        server.stop(_STOP_S).wait()
