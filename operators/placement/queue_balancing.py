"""Queue balancing: moves waiting requests to replicas that can run them at once.

Replicas are assigned whole batches: while requests wait at one, another of the same weight version may have room that
stays empty. A waiting request holds no KV, so its move costs no prefill and saves the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from operators.placement.repack import KVLoad, Move

SHORT_QUEUE = 8
"""A queue with at most one waiting request per `SHORT_QUEUE` running ones is left as it is: it clears soon."""


def plan_queue_balancing(
    loads: Sequence[KVLoad], moves: Sequence[Move], fresh_kv: int, kv_share: float = 0.99, *, idle_too: bool = False
) -> list[Move]:
    """Moves of waiting requests among the replicas of one weight version, in addition to the `moves` of a repack plan.

    At its destination each request counts as `fresh_kv` ≥ 1 tokens of KV. Sources and destinations of `moves` are left
    out. Idle replicas receive requests only with `idle_too`; else they remain free for newer weights. The emptiest
    replica receives first, from the longest queue.
    """
    busy = {replica for move in moves for replica in (move.source, move.destination)}
    free = [load for load in loads if load.replica not in busy and not load.leaving]
    queues = [(-excess, load.replica) for load in free if (excess := _excess(load)) > 0]
    if not queues:
        return []
    heapify(queues)
    destinations = (load for load in free if not load.waiting and (load.requests or idle_too))
    rooms = [(room, load.replica) for load in destinations if (room := _room(load, fresh_kv, kv_share)) > 0]
    balanced: list[Move] = []
    for room, replica in sorted(rooms, reverse=True):
        excess, source = -queues[0][0], queues[0][1]
        count = min(excess, room)
        balanced.append(Move(source, replica, count, 0, waiting=True))
        if count < excess:
            heapreplace(queues, (count - excess, source))
        else:
            heappop(queues)
        if not queues:
            break
    return balanced


def _excess(load: KVLoad) -> int:
    """How many waiting requests of a replica exceed a short queue."""
    waiting = min(load.waiting, load.requests)
    return waiting - -(-(load.requests - waiting) // SHORT_QUEUE)


def _room(load: KVLoad, fresh_kv: int, kv_share: float) -> int:
    """How many more fresh requests a replica could run at once."""
    kv = int(kv_share * load.kv_capacity) - load.kv_used - load.growth
    return min(kv // fresh_kv, load.most_requests - load.requests)
