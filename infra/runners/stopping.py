"""The process-wide stop request: set by SIGTERM, checked by every source, which then finishes and drains.

A step that hands its work over before it ends accepts notices: then the first SIGTERM only gives notice, and the step
requests the stop itself, when its work has left or its time is up. SIGINT, or a second SIGTERM, stops at once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = threading.Event()

AT_END: set[Callable[[], None]] = set()
"""Functions that close what the steps of this process have opened: a worker calls them before it ends."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class TerminationNotice:
    """The announcement that this process will be ended. Signal handlers give it, a step takes it.

    `given_at` is the time, in monotonic seconds; None without notice.
    """

    def __init__(self) -> None:
        self._accepted = False
        self.given_at: float | None = None

    def accept(self) -> None:
        """From now on the first SIGTERM gives notice, instead of stopping the process."""
        self._accepted = True

    def give(self) -> bool:
        """Give notice. Returns whether the step takes it: one that accepts notices and has none yet."""
        if not self._accepted or self.given_at is not None:
            return False
        self.given_at = time.monotonic()
        return True

    def end(self) -> None:
        """The step's work has left: stop now."""
        STOPPING.set()

    def reset(self) -> None:
        """Forget all: the pipeline of this process has ended."""
        self._accepted, self.given_at = False, None


NOTICE = TerminationNotice()
"""That of this process."""


def stop_on_signals() -> None:
    """Set `STOPPING` on SIGTERM and SIGINT, or give notice. Call from the main thread."""
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
        NOTICE.reset()


def _stop(number: int, frame: FrameType | None) -> None:
    if number != signal.SIGTERM or not NOTICE.give():
        STOPPING.set()
