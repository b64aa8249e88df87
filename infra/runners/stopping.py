"""The process-wide wish to stop: set by SIGTERM, seen by every source, which then finishes its work cleanly."""

from __future__ import annotations

import signal
import threading
from types import FrameType

STOPPING = threading.Event()


def stop_on_signals() -> None:
    """Let SIGTERM and SIGINT ask this process to drain. Call from the main thread."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    STOPPING.set()
