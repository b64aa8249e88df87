"""Runs some roles of a run in one process, as one host does: role_host.py CONFIG ROLE... until SIGTERM.

The variable of `host_clock` sets the host's clock. Exit code 1 if a role failed: the parent process then restarts it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from faults.host_clock import VARIABLE, shift_clock  # noqa: E402

shift_clock(float(os.environ.get(VARIABLE, "0")))

from faults.role_threads import close_roles, start_roles  # noqa: E402

from infra.runners.role_logging import configure_logging  # noqa: E402
from pipelines.config import load_config  # noqa: E402


def main() -> None:
    """Start the roles, wait for SIGTERM or a failed role, close all."""
    configure_logging()
    config = load_config(Path(sys.argv[1]))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    roles = start_roles(config, sys.argv[2:])
    failed = False
    while not stop.wait(0.2) and not failed:
        failed = any(role.error is not None for role in roles)
    close_roles(roles)
    sys.exit(failed)


if __name__ == "__main__":
    main()
