"""Where the time of an agent's episode went: pure functions of the times of its turns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class EpisodeTimes(NamedTuple):
    """Seconds before the first request, in requests, and between requests (the agent's own work and its tools)."""

    waiting: float
    model: float
    agent: float


def times_of(assigned_at: int, turns: Iterable[tuple[int, int]], ended_at: int) -> EpisodeTimes:
    """The times of an episode from its assignment to its end; `turns` are (requested, ended). All in Unix milliseconds.

    Turns at the same time count once.
    """
    model, free_from, first = 0, assigned_at, None
    for start, stop in sorted(turns):
        first = start if first is None else first
        model += max(0, stop - max(start, free_from))
        free_from = max(free_from, stop)
    waiting = max(0, (ended_at if first is None else first) - assigned_at)
    agent = 0 if first is None else max(0, ended_at - first - model)
    return EpisodeTimes(waiting / 1000, model / 1000, agent / 1000)
