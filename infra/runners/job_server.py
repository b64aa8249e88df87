"""Waits until the job server to which a pipeline is submitted accepts connections."""

from __future__ import annotations

import time

import grpc
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions

from infra.runners.stopping import STOPPING

START_TIMEOUT_S = 60.0
"""Seconds that a job server may take to start. Beam's own limit, `--job_server_timeout`, also limits the job."""
_POLL_S = 0.25
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
    with grpc.insecure_channel(endpoint) as channel:
        ready = grpc.channel_ready_future(channel)
        while time.monotonic() < deadline and not STOPPING.is_set():
            try:
                ready.result(timeout=_POLL_S)
                return True
            except grpc.FutureTimeoutError:
                continue
        ready.cancel()
    if STOPPING.is_set():
        return False
    raise NoJobServer(f"no job server responds at {endpoint} after {timeout_s:g} s: set --job_endpoint to its address")
