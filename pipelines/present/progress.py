"""What a command does before its first result, as lines on standard error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from infra.escaping import print_escaped

LINE_S = 10.0


def print_error_line(line: str) -> None:
    """Print `line` on standard error."""
    print_escaped(line, err=True)


class ProgressPrinter:
    """Prints what begins (`subject`, then the argument of each `begin`), and every `every_s` seconds that it lasts.

    With `only_slow` it prints only what lasts that long, for the first time after `first_s`. `so_far` is put after the
    subject of these lines.
    """

    def __init__(
        self,
        subject: str,
        print_line: Callable[[str], None] = print_error_line,
        every_s: float = LINE_S,
        *,
        only_slow: bool = False,
        first_s: float | None = None,
        so_far: Callable[[], str] = str,
    ) -> None:
        self._print_line, self._every_s, self._only_slow = print_line, every_s, only_slow
        self._first_s, self._so_far = every_s if first_s is None else first_s, so_far
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)
        self.begin(subject)

    def begin(self, subject: str) -> None:
        """Print that `subject` begins."""
        with self._lock:
            self._subject, self._since = subject, time.monotonic()
            if not self._only_slow:
                self._print_line(subject)

    def __enter__(self) -> ProgressPrinter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _repeat(self) -> None:
        pause_s = self._first_s
        while not self._ended.wait(pause_s):
            pause_s = self._every_s
            with self._lock:
                self._print_line(f"{self._subject}{self._so_far()} ({time.monotonic() - self._since:.0f} s)")
