"""The process-wide stop request: set by SIGTERM, checked by every source, which then finishes and drains."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = threading.Event()

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_on_signals() -> None:
    """Set `STOPPING` on SIGTERM and SIGINT. Call from the main thread."""
    for number in _SIGNALS:
        signal.signal(number, _stop)


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Set `STOPPING` on SIGTERM and SIGINT during the `with` block; then restore the handlers and clear `STOPPING`.

    Only the main thread can set handlers; in another thread the caller sets `STOPPING`.
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
