"""Repack: moves trajectories together, so that the emptied replicas are free for newer weights (Laminar §5).

Best fit: sources by rising KV use, each as a whole to the fullest destination with enough room. A destination is never
a source. The room includes the expected growth of the moved trajectories.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVLoad:
    """One replica of a weight version, KV in tokens.

    `kv_before` is its KV use one period ago (None: unknown), `growth` the expected further KV of its requests,
    `most_requests` their maximum number. A `leaving` replica drains: it gives away every request that finds room.
    """

    replica: int
    kv_used: int
    kv_capacity: int
    kv_before: int | None
    requests: int
    waiting: int
    most_requests: int
    growth: int = 0
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """`requests` requests of `source` move to `destination`, with `kv` tokens at present.

    They are the oldest that no earlier move of the plan takes; with `waiting` the youngest, which hold no KV yet.
    """

    source: int
    destination: int
    requests: int
    kv: int
    waiting: bool = False


def is_idle(load: KVLoad, kv_share: float) -> bool:
    """Whether a replica is past its peak: no request waits, or its KV use has fallen below both before and its limit.

    A replica with a few stragglers whose KV still grows counts too, since no request waits there.
    """
    if load.requests >= load.most_requests:
        return False
    falling = load.kv_before is not None and load.kv_used < min(kv_share * load.kv_capacity, load.kv_before)
    return load.waiting == 0 or falling


def plan_repack(loads: Sequence[KVLoad], kv_share: float = 0.99, *, only_leaving: bool = False) -> list[Move]:
    """Moves among the replicas of one weight version that empty as many replicas as possible.

    No destination exceeds `kv_share` of its KV, growth included, or `most_requests`. With `only_leaving` only leaving
    replicas are sources.
    """
    idle = [load for load in loads if load.requests and not load.leaving and is_idle(load, kv_share)]
    room = _Room([load for load in loads if not load.leaving], kv_share)
    moves: list[Move] = []
    for load in loads:
        if load.leaving and load.requests:
            moves += room.take(load)
    if only_leaving:
        return moves
    room.keep([load.replica for load in idle])
    received = {move.destination for move in moves}
    most = math.inf  # requests of a source that found no room: later ones are larger, and the room only shrinks
    for load in sorted(idle, key=lambda load: (load.kv_used + load.growth, load.requests)):
        if load.replica in received or load.requests >= most:
            continue
        parts = room.take(load, whole=True)
        if not parts:
            most = load.requests
        received |= {part.destination for part in parts}
        moves += parts
    return moves


class _Room:
    """Free KV and free requests of the destinations, ordered by free KV: the fullest first."""

    def __init__(self, loads: Sequence[KVLoad], kv_share: float) -> None:
        self._free = {
            load.replica: (int(kv_share * load.kv_capacity) - load.kv_used, load.most_requests - load.requests)
            for load in loads
        }
        self._order = sorted((kv, replica) for replica, (kv, requests) in self._free.items() if kv > 0 < requests)

    def keep(self, replicas: Collection[int]) -> None:
        """Limit the destinations to `replicas`."""
        kept = set(replicas)
        self._order = [(kv, replica) for kv, replica in self._order if replica in kept]

    def take(self, load: KVLoad, *, whole: bool = False) -> list[Move]:
        """Moves of `load` to the fullest destination with room for all of it, else in parts; a source receives no more.

        Parts go to as few destinations as possible, and may leave a rest. With `whole` there is no move unless all
        fits, and parts go to the fullest destinations, so that the emptier ones can still be sources.
        """
        parts = self._fit_whole(load) or self._fit_parts(load, fullest_first=whole)
        if whole and sum(requests for _, requests in parts) < load.requests:
            return []
        if parts:
            self._close(load.replica)
        return [self._move(load, replica, requests) for replica, requests in parts]

    def _fit_whole(self, load: KVLoad) -> list[tuple[int, int]]:
        """The fullest destination with room for all of `load`, if any."""
        first = bisect_left(self._order, (load.kv_used + load.growth, -1))
        for place in range(first, len(self._order)):
            replica = self._order[place][1]
            if replica != load.replica and self._free[replica][1] >= load.requests:
                return [(replica, load.requests)]
        return []

    def _fit_parts(self, load: KVLoad, *, fullest_first: bool) -> list[tuple[int, int]]:
        """Destinations and request counts that together take `load`, as far as there is room."""
        parts, left = [], load.requests
        each = max(1, -(-(load.kv_used + load.growth) // load.requests))
        destinations = self._order[bisect_left(self._order, (each, -1)) :]
        for kv, replica in destinations if fullest_first else reversed(destinations):
            if not left:
                break
            count = min(left, self._free[replica][1], kv // each)
            if count > 0 and replica != load.replica:
                parts.append((replica, count))
                left -= count
        return parts

    def _move(self, load: KVLoad, destination: int, requests: int) -> Move:
        """Record a move and the room that it takes."""
        kv, free = self._free[destination]
        share = requests / load.requests
        self._close(destination)
        left = self._free[destination] = (kv - int((load.kv_used + load.growth) * share), free - requests)
        if min(left) > 0:
            insort(self._order, (left[0], destination))
        return Move(load.replica, destination, requests, int(load.kv_used * share))

    def _close(self, replica: int) -> None:
        """Remove `replica` from the destinations."""
        entry = (self._free.get(replica, (0, 0))[0], replica)
        place = bisect_left(self._order, entry)
        if self._order[place : place + 1] == [entry]:
            del self._order[place]
