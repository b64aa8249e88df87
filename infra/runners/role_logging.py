"""The log of a role's process, or of a worker that runs its steps elsewhere."""

from __future__ import annotations

import logging

from infra.escaping import EscapingFormatter
from infra.quiet_libraries import quiet_kafka
from infra.runners.liveness import dump_stacks_on_signal


def configure_logging(worker: str = "") -> None:
    """Log to standard error, one line per event, with the name of a `worker`; SIGUSR1 writes the stacks of all threads
    there."""
    dump_stacks_on_signal()
    to_stderr = logging.StreamHandler()
    source = f"{worker} %(name)s" if worker else "%(name)s"
    to_stderr.setFormatter(EscapingFormatter(f"%(asctime)s %(levelname).1s {source}: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_stderr], force=True)
    quiet_kafka(log_defects=True)
    logging.getLogger("apache_beam").setLevel(logging.ERROR)
