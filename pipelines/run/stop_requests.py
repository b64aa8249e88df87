"""Stop requests by signal: Ctrl-C, SIGTERM, and SIGHUP from a closed terminal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

FORCED_EXIT_AFTER = 3
"""This many requests end the process at once; the zygote and the broker's guard process clean up after it."""
REPEATED_AFTER_S = 1.0
"""Signals that come sooner after a request belong to it: a closed terminal sends SIGHUP, and its shell another."""
_MEANINGS = {
    signal.SIGINT: "Ctrl-C (SIGINT)",
    signal.SIGTERM: "`laminar runs stop` or the system (SIGTERM)",
    signal.SIGHUP: "the end of its terminal (SIGHUP)",
}
_SIGNALS = tuple(_MEANINGS)


class Interrupted(Exception):
    """Signal `number` stopped the run before its goal."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(f"stopped by {_MEANINGS[signal.Signals(number)]}")
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code that shells use: 130 for Ctrl-C."""
        return 128 + self.number


class StopRequests:
    """Defers shutdown signals to safe points: `check` raises Interrupted; in an `interruptible` block a signal does.

    An exception at an arbitrary line could leave a change half done. A context manager, for the main thread. Signals
    that the parent process ignores (`nohup`, background jobs) stay ignored. `final`: the process ends after the block,
    so signals are ignored from then on.
    """

    def __init__(self, *, final: bool = False) -> None:
        self._final = final
        self._requests: list[int] = []
        self._requested_at = -float("inf")
        self._interruptible = False
        self._previous: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> StopRequests:
        self._terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        while self._previous:
            number, previous = self._previous.popitem()
            signal.signal(number, signal.SIG_IGN if self._final else previous)

    @property
    def repeated(self) -> bool:
        """Whether a stop was requested more than once, at least `REPEATED_AFTER_S` apart."""
        return len(self._requests) > 1

    def check(self) -> None:
        """Raise Interrupted if a stop was requested."""
        if self._requests:
            raise Interrupted(self._requests[0])

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise Interrupted at once on a request in the block: for long calls that can be abandoned at any point.

        Also if the block then fails with another error: a library may have made it of Interrupted, as Thread.start.
        """
        self._interruptible = True
        try:
            self.check()
            yield
        except Interrupted:
            raise
        except Exception as error:
            if self._requests:
                raise Interrupted(self._requests[0]) from error
            raise
        finally:
            self._interruptible = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._close_terminal()
        if (now := time.monotonic()) - self._requested_at < REPEATED_AFTER_S:
            return
        self._requests.append(number)
        self._requested_at = now
        if len(self._requests) >= FORCED_EXIT_AFTER:
            os._exit(128 + number)
        if self._interruptible:
            self._interruptible = False  # cleanup must not be interrupted
            raise Interrupted(number)

    def _close_terminal(self) -> None:
        """Redirect output to /dev/null, since writes to a closed terminal fail."""
        devnull = os.open(os.devnull, os.O_RDWR)
        while self._terminals:
            os.dup2(devnull, self._terminals.pop())
        os.close(devnull)
