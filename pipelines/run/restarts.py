"""How soon what has died is started again, and when that is given up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

WITHIN_S = 60.0
MOST = 6
"""What dies more often than so within `WITHIN_S` seconds is not started again."""
FIRST_PAUSE_S = 0.1


@dataclass(slots=True)
class Restarts:
    """Deaths of one process, by `clock` in seconds."""

    clock: Callable[[], float] = time.monotonic
    deaths: tuple[float, ...] = field(default=())

    def count(self) -> float | None:
        """Count a death: the pause in seconds before the next start, twice the last one; None: give it up."""
        now = self.clock()
        self.deaths = (*(death for death in self.deaths if now - death < WITHIN_S), now)
        return self.pause() if len(self.deaths) <= MOST else None

    def pause(self) -> float:
        """The pause that goes with the deaths so far, in seconds."""
        return FIRST_PAUSE_S * 2.0 ** min(max(len(self.deaths) - 1, 0), MOST)

    def rate(self) -> str:
        """The deaths in words."""
        return f"{len(self.deaths)} times in {WITHIN_S:.0f} s"
