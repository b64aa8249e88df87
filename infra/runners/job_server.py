"""The job server to which a pipeline is submitted: whether it answers, before anything is asked of it."""

from __future__ import annotations

import time

import grpc
from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions

from infra.runners.stopping import STOPPING

ANSWERS_WITHIN_S = 60.0
"""What starts beside us may take as long. Beam itself waits for as long as a job may last: `--job_server_timeout`."""
_LOOK_S = 0.25
_WITHIN_BEAM = "embed"


class NoJobServer(RuntimeError):
    """Nothing to which Beam could submit a job answers."""


def wait_for_job_server(options: PipelineOptions) -> bool:
    """Return True once the job server that `options` name answers, or at once where they name none; False if `STOPPING`
    is set first.

    Raises NoJobServer after `ANSWERS_WITHIN_S` seconds, or `--job_server_timeout` where that is less.
    """
    portable = options.view_as(PortableOptions)
    endpoint, patience = portable.job_endpoint, min(ANSWERS_WITHIN_S, portable.job_server_timeout)
    if not endpoint or endpoint == _WITHIN_BEAM:
        return True
    deadline = time.monotonic() + patience
    with grpc.insecure_channel(endpoint) as channel:
        ready = grpc.channel_ready_future(channel)
        while time.monotonic() < deadline and not STOPPING.is_set():
            try:
                ready.result(timeout=_LOOK_S)
                return True
            except grpc.FutureTimeoutError:
                continue
        ready.cancel()
    if STOPPING.is_set():
        return False
    raise NoJobServer(
        f"no job server answers at {endpoint}, tried for {patience:g} s: --job_endpoint is where Beam's job server is"
    )
