"""The turns of an episode as a tree: each continues the conversation of an earlier turn, or begins a new one.

A path from a root to a leaf is a conversation. Imports no numeric code: commands that only read use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from schemas.records.agents import TokenRange, TurnEnded, TurnRequest, extended

Ranges = tuple[TokenRange, ...]


class CompleteTurn(NamedTuple):
    """A turn whose response is complete."""

    request: TurnRequest
    ended: TurnEnded

    @property
    def given(self) -> int:
        """Where its response begins among the tokens of the episode."""
        return self.request.start + len(self.request.token_ids)

    @property
    def asked(self) -> Ranges:
        """What the model read."""
        return extended(self.request.context, self.request.start, self.given)

    @property
    def whole(self) -> Ranges:
        """What the model read, and its response."""
        return extended(self.asked, self.given, self.ended.stop)


def leaf_turns(turns: Sequence[CompleteTurn]) -> list[CompleteTurn]:
    """The turns whose conversation no other turn continues, in their order."""
    continued = {turn.request.context for turn in turns}
    return [turn for turn in turns if turn.whole not in continued]


def length_of(ranges: Ranges) -> int:
    """How many tokens are in `ranges`."""
    return sum(each.stop - each.start for each in ranges)


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
