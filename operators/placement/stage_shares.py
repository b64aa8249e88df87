"""The shares of a stage group's requests that its whole members take over. A pure function."""

from __future__ import annotations

from collections.abc import Sequence

from operators.placement.repack import KVLoad, Move


def plan_shares(leader: KVLoad, whole: Sequence[KVLoad], others: int, kv_share: float = 0.99) -> list[Move]:
    """Moves from `leader` that give each of the `whole` members an even share of the requests.

    The `others` members, the leader included, keep theirs. A member that lacks less than a quarter of its share gets
    nothing, because a move costs the transfer of KV. No member exceeds `kv_share` of its KV, growth included, or
    its maximum number of requests.
    """
    total = leader.requests + sum(load.requests for load in whole)
    share = total // max(1, len(whole) + others)
    left, moves = leader.requests, []
    each = max(1, -(-(leader.kv_used + leader.growth) // max(1, leader.requests)))
    for load in whole:
        room = min(load.most_requests - load.requests, (int(kv_share * load.kv_capacity) - load.kv_used) // each)
        count = min(share - load.requests, left, room)
        if count > share // 4:
            moves.append(Move(leader.replica, load.replica, count, leader.kv_used * count // leader.requests))
            left -= count
    return moves
