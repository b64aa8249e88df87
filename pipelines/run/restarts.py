"""Restart policy of processes: exponential backoff, and a limit on deaths per minute."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from infra.processes import signal_name

WITHIN_S = 60.0
MAX_DEATHS = 6
"""A process with more deaths than this within `WITHIN_S` seconds is not restarted."""
FIRST_PAUSE_S = 0.1


@dataclass(slots=True)
class Restarts:
    """The recent deaths of one process; `clock` is in seconds."""

    clock: Callable[[], float] = time.monotonic
    deaths: tuple[float, ...] = field(default=())

    def record_death(self) -> float | None:
        """Record a death. Returns the pause before the restart in seconds, twice the last one; None: do not restart."""
        now = self.clock()
        self.deaths = (*(death for death in self.deaths if now - death < WITHIN_S), now)
        return self.pause() if len(self.deaths) <= MAX_DEATHS else None

    def pause(self) -> float:
        """The pause after the deaths so far, in seconds."""
        return FIRST_PAUSE_S * 2.0 ** min(max(len(self.deaths) - 1, 0), MAX_DEATHS)

    def rate(self) -> str:
        """The number of deaths, for messages."""
        return f"{len(self.deaths)} times in {WITHIN_S:.0f} s"


def exit_text(code: int) -> str:
    """How a process with this exit code has ended, for messages."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
