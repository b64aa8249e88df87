"""Requests to stop a run: Ctrl-C, SIGTERM, a terminal that goes away."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

FORCED_EXIT_AFTER = 3
"""So many requests end the process at once; those who guard the roles and the broker clean up behind it."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The run was asked to stop before its goal, by signal `number`."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def exit_code(self) -> int:
        """As a shell tells it: 130 for Ctrl-C."""
        return 128 + self.number


class StopRequests:
    """Holds requests until `check` is called, or raises at once while the block of `waiting` is at a long call.

    A signal must not end any odd line of Python: what was half done could not be put right. A context manager, for the
    main thread. Signals that the parent has had ignored (`nohup`, a job in the background) stay ignored. `final`
    says that nothing but the end of the process follows, where a request changes nothing any more: it is not heard.
    """

    def __init__(self, *, final: bool = False) -> None:
        self._final = final
        self._asked: list[int] = []
        self._waiting = False
        self._before: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> StopRequests:
        self._terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, signal.SIG_IGN if self._final else before)

    def check(self) -> None:
        """Raise Interrupted if a stop has been asked for."""
        if self._asked:
            raise Interrupted(self._asked[0])

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a request raise Interrupted within the block: for calls that take long and can be given up anywhere."""
        self._waiting = True
        try:
            self.check()
            yield
        finally:
            self._waiting = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked.append(number)
        if number == signal.SIGHUP:
            self._let_go_of_terminal()
        if len(self._asked) >= FORCED_EXIT_AFTER:
            os._exit(128 + number)
        if self._waiting:
            self._waiting = False  # what cleans up must not be interrupted in its turn
            raise Interrupted(number)

    def _let_go_of_terminal(self) -> None:
        """Writing to a terminal that is gone fails: what is still said goes nowhere."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        while self._terminals:
            os.dup2(nowhere, self._terminals.pop())
        os.close(nowhere)
