"""Which replicas give up their trajectories to which, so that they are free for newer weights (Laminar §5).

Best fit: sources by rising KV use, each whole to the fullest destination that still takes it. A replica that is to
receive never gives; what fits includes what the moved trajectories may still grow.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """One replica of a weight version, KV in tokens.

    `kv_before` is its KV use a period ago (None: unknown), `growth` what its requests may still gain, `most_requests`
    what it may have at once. One that is `leaving` gives whatever anybody takes.
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
    """`requests` requests of `source` go to `destination`, with `kv` tokens as of now."""

    source: int
    destination: int
    requests: int
    kv: int


def is_idle(load: Load, kv_share: float) -> bool:
    """Whether a replica is past its peak: nothing waits, or its KV use is below what it had and may have.

    A few stragglers whose KV still grows have nothing waiting behind them, so they are seen too.
    """
    if load.requests >= load.most_requests:
        return False
    falling = load.kv_before is not None and load.kv_used < min(kv_share * load.kv_capacity, load.kv_before)
    return load.waiting == 0 or falling


def plan_repack(loads: Sequence[Load], kv_share: float = 0.99, *, only_leaving: bool = False) -> list[Move]:
    """Moves among the replicas of one weight version, so that as many as possible are emptied.

    No destination is filled beyond `kv_share` of its KV, growth counted, nor beyond its requests. With `only_leaving`
    the others stay as they are.
    """
    idle = [load for load in loads if load.requests and not load.leaving and is_idle(load, kv_share)]
    leaving = [load for load in loads if load.requests and load.leaving]
    takers = [load for load in loads if not load.leaving] if leaving else idle
    room = _Room(takers, kv_share)
    moves: list[Move] = []
    for load in leaving:
        moves += room.spread(load)
    received = {move.destination for move in moves}
    for load in [] if only_leaving else sorted(idle, key=lambda load: (load.kv_used, load.requests)):
        if load.replica in received:
            continue
        destination = room.fullest_for(load, only={each.replica for each in idle} if leaving else None)
        if destination is not None:
            moves.append(room.move(load, destination, load.requests))
            received.add(destination)
            room.close(load.replica)
    return moves


class _Room:
    """Free KV and free requests of those that may receive, ordered by free KV: the fullest first."""

    def __init__(self, loads: Sequence[Load], kv_share: float) -> None:
        self._free = {
            load.replica: (int(kv_share * load.kv_capacity) - load.kv_used, load.most_requests - load.requests)
            for load in loads
        }
        self._order = sorted((kv, replica) for replica, (kv, _) in self._free.items())

    def fullest_for(self, load: Load, only: set[int] | None) -> int | None:
        """Who takes all of `load`; never itself, and one of `only` where that is given."""
        first = bisect_left(self._order, (load.kv_used + load.growth, -1))
        for place in range(first, len(self._order)):
            replica = self._order[place][1]
            fits = replica != load.replica and self._free[replica][1] >= load.requests
            if fits and (only is None or replica in only):
                return replica
        return None

    def spread(self, load: Load) -> list[Move]:
        """Moves of as much of `load` as anybody takes, to as few as possible."""
        moves, left = [], load.requests
        whole = self.fullest_for(load, None)
        if whole is not None:
            return [self.move(load, whole, left)]
        each = max(1, -(-(load.kv_used + load.growth) // load.requests))
        for kv, replica in reversed(self._order.copy()):
            count = min(left, self._free[replica][1], kv // each)
            if count > 0 and replica != load.replica:
                moves.append(self.move(load, replica, count))
                left -= count
        return moves

    def move(self, load: Load, destination: int, requests: int) -> Move:
        """Enter a move, and what it takes."""
        kv, free = self._free[destination]
        share = requests / load.requests
        self.close(destination)
        self._free[destination] = (kv - int((load.kv_used + load.growth) * share), free - requests)
        insort(self._order, (self._free[destination][0], destination))
        return Move(load.replica, destination, requests, int(load.kv_used * share))

    def close(self, replica: int) -> None:
        """`replica` receives no more."""
        entry = (self._free[replica][0], replica)
        del self._order[bisect_left(self._order, entry)]
