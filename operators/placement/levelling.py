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


def plan_levelling(loads: Sequence[Load], moves: Sequence[Move], fresh_kv: int, kv_share: float = 0.99) -> list[Move]:
    """Moves of waiting requests among the replicas of one weight version, beside the `moves` of a repack plan.

    Where it comes to, each counts as `fresh_kv` ≥ 1 tokens of KV. Whoever gives in `moves` is to be emptied, and takes
    nothing; who receives there gives nothing, and has so much less room. The emptiest takes first, and from the
    longest queue.
    """
    emptied, received = {move.source for move in moves}, {move.destination for move in moves}
    staying = [load for load in loads if load.replica not in emptied and not load.leaving]
    givers = (load for load in staying if load.replica not in received)
    queues = [(-spare, load.replica) for load in givers if (spare := _spare(load)) > 0]
    if not queues:
        return []
    heapify(queues)
    levelled: list[Move] = []
    for room, replica in sorted(_rooms(staying, moves, fresh_kv, kv_share), reverse=True):
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


def _rooms(loads: Sequence[Load], moves: Sequence[Move], fresh_kv: int, kv_share: float) -> list[tuple[int, int]]:
    """(requests that it could run at once beside its own, replica) for each that can."""
    coming = {load.replica: [0, 0] for load in loads}
    for move in moves:
        coming[move.destination][0] += move.kv
        coming[move.destination][1] += move.requests
    rooms = []
    for load in loads:
        kv, requests = coming[load.replica]
        free = int(kv_share * load.kv_capacity) - load.kv_used - load.growth - kv
        room = min(free // fresh_kv, load.most_requests - load.requests - requests)
        if room > 0 and load.requests and not load.waiting:
            rooms.append((room, load.replica))
    return rooms
