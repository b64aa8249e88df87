"""Which waiting requests go where they can run at once.

Replicas are given batches as a whole: while requests wait at one, another of the same weight version may have room that
nobody fills until it is emptied. What waits holds no KV, so moving it costs no prefill, and saves it the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from operators.placement.repack import Load, Move

SHORT_QUEUE = 8
"""A queue is left alone that has at most one request to so many that run: it is served within moments."""


def plan_queue_balancing(
    loads: Sequence[Load], moves: Sequence[Move], fresh_kv: int, kv_share: float = 0.99, *, idle_too: bool = False
) -> list[Move]:
    """Moves of waiting requests among the replicas of one weight version, beside the `moves` of a repack plan.

    Where it comes to, each counts as `fresh_kv` ≥ 1 tokens of KV. Whoever gives or gets in `moves` is left alone. Those
    who have nothing take only if the `idle_too` are to: else they are free for newer weights. The emptiest takes first,
    and from the longest queue.
    """
    busy = {replica for move in moves for replica in (move.source, move.destination)}
    free = [load for load in loads if load.replica not in busy and not load.leaving]
    queues = [(-spare, load.replica) for load in free if (spare := _spare(load)) > 0]
    if not queues:
        return []
    heapify(queues)
    takers = (load for load in free if not load.waiting and (load.requests or idle_too))
    rooms = [(room, load.replica) for load in takers if (room := _room(load, fresh_kv, kv_share)) > 0]
    levelled: list[Move] = []
    for room, replica in sorted(rooms, reverse=True):
        spare, giver = -queues[0][0], queues[0][1]
        count = min(spare, room)
        levelled.append(Move(giver, replica, count, 0, waiting=True))
        if count < spare:
            heapreplace(queues, (count - spare, giver))
        else:
            heappop(queues)
        if not queues:
            break
    return levelled


def _spare(load: Load) -> int:
    """How many of its waiting requests would wait for long."""
    waiting = min(load.waiting, load.requests)
    return waiting - -(-(load.requests - waiting) // SHORT_QUEUE)


def _room(load: Load, fresh_kv: int, kv_share: float) -> int:
    """How many fresh requests it could run at once beside its own."""
    kv = int(kv_share * load.kv_capacity) - load.kv_used - load.growth
    return min(kv // fresh_kv, load.most_requests - load.requests)
