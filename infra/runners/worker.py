"""A worker of a portable runner as a process: `python -m infra.runners.worker CONTROL_ADDRESS WORKER_ID`.

It runs the steps that the runner sends it until the runner closes the connection or is gone. It exits if a step exceeds
its budget or a vital thread has failed; the runner then starts its shards again in another worker.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

import grpc
from apache_beam.runners.worker.sdk_worker import SdkHarness

from infra.runners.garbage_collection import reduce_gc_frequency
from infra.runners.liveness import LIVENESS
from infra.runners.role_logging import configure_logging
from infra.runners.stopping import AT_END, STOPPING
from infra.runners.thread_switches import switch_threads_sooner

log = logging.getLogger(__name__)

DRAIN_S = 2.0
"""Seconds in which the sources of a worker end with their last outputs."""
CLOSE_S = 8.0
"""Seconds in which these outputs are committed."""


def main(control_address: str, worker_id: str) -> None:
    """Run until the runner ends the connection; then drain, and end the process, whatever its other threads do."""
    configure_logging(worker_id)
    reduce_gc_frequency()
    switch_threads_sooner()
    code = 0
    try:
        harness = SdkHarness(control_address, worker_id=worker_id, state_cache_size=0, data_buffer_time_limit_ms=0)
        with LIVENESS.reporting(None):
            harness.run()
    except grpc.RpcError as error:
        log.warning("the runner is gone: %s", error)
        code = 1
    finally:
        try:
            drain()
        except Exception:
            log.exception("the last outputs may be lost")
        finally:
            logging.shutdown()
            os._exit(code)  # a source that still polls would keep the process, and its shard, alive


def drain() -> None:
    """Let the sources end, and commit what the steps have emitted: an open transaction would hold its readers up.

    A successor may have begun already: it has fenced this worker, which then commits nothing.
    """
    STOPPING.set()
    if AT_END:
        time.sleep(DRAIN_S)
    for close in [*AT_END]:
        closing = threading.Thread(target=close, name="close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
