"""Totals of finished episodes, as the metric `agents`: turns, conversations, tool calls, and where their time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from operators.gateway.episode_table import Episode
from operators.gateway.episode_times import times_of
from operators.gateway.turn_tree import leaf_turns
from operators.io.elements import PartitionKey, ReceivedRecord
from schemas.records import Metric
from schemas.topics import TRAJECTORIES

NAME = "agents"
EVERY_MS = 2000
"""A metric is written at most this often."""


class EpisodeCounts:
    """Counts the episodes of process `index` of `processes`: the others count theirs.

    `state` is that of the last commit: a restart reads records again that are counted already.
    """

    def __init__(self, index: int, processes: int, state: Mapping[str, Mapping[str, float]] | None = None) -> None:
        self._index, self._processes = index, processes
        state = state or {}
        self._totals: Counter[str] = Counter(state.get("totals", {}))
        self._counted = dict(state.get("counted", {}))
        self._published = self._values()
        self._published_at = 0

    def add(self, episode: Episode, received: ReceivedRecord) -> None:
        """Count a finished episode; `received` is its trajectory."""
        trajectory = received.record
        counted = received.offset < self._counted.get(str(received.partition), 0)
        if counted or trajectory.prompt.number % self._processes != self._index:
            return
        turns = episode.ended_turns()
        times = times_of(
            episode.assigned_at,
            [(turn.request.written_at, turn.ended.written_at) for turn in turns],
            trajectory.finished_at,
        )
        self._totals.update(
            {
                "episodes": 1,
                "failed": trajectory.finish_reason == "failed",
                "turns": len(turns),
                "conversations": len(leaf_turns(turns)),
                "tool_calls": episode.tool_calls,
                **{f"{name}_s": value for name, value in times._asdict().items()},
            }
        )

    def metric(self, now: int) -> Metric | None:
        """The totals at `now` (Unix milliseconds), if they are new and the last metric is old enough."""
        totals = self._values()
        if totals == self._published or 0 <= now - self._published_at < EVERY_MS:
            return None
        self._published, self._published_at = totals, now
        return Metric(NAME, self._index, totals, now)

    def state(self, positions: Mapping[PartitionKey, int]) -> dict[str, Any]:
        """The totals once all records before `positions` are folded, for the commit note."""
        for place, offset in positions.items():
            if place.topic == TRAJECTORIES.short_name:
                self._counted[str(place.partition)] = offset
        return {"totals": self._values(), "counted": dict(self._counted)}  # the note is written later

    def _values(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._totals.items()}
