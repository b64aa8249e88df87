"""The process-wide wish to stop: set by SIGTERM, seen by every source, which then finishes its work cleanly."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = threading.Event()

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_on_signals() -> None:
    """Let SIGTERM and SIGINT ask this process to drain. Call from the main thread."""
    for number in _SIGNALS:
        signal.signal(number, _stop)


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Drain on SIGTERM and SIGINT while the block runs, then put things back: handlers, and the wish itself.

    Outside the main thread, which alone may set handlers, it is the caller who sets `STOPPING`.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        if main:
            stop_on_signals()
        yield
    finally:
        if main:
            for number, handler in before.items():
                signal.signal(number, handler)
        STOPPING.clear()


def _stop(number: int, frame: FrameType | None) -> None:
    STOPPING.set()
