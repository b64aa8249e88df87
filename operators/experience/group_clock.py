"""The clock of group time-outs, which stands still while the run is paused."""

from __future__ import annotations

from collections.abc import Callable


class GroupClock:
    """Seconds of `clock` (monotonic) without the times between `stop` and `go`; both may be repeated."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stopped_at: float | None = None
        self._stopped_s = 0.0

    def __call__(self) -> float:
        return (self._clock() if self._stopped_at is None else self._stopped_at) - self._stopped_s

    def stop(self) -> None:
        if self._stopped_at is None:
            self._stopped_at = self._clock()

    def go(self) -> None:
        """Let a stopped clock continue."""
        if self._stopped_at is not None:
            self._stopped_s += self._clock() - self._stopped_at
            self._stopped_at = None
