"""A rollout process that has been given notice: its trajectories leave with their KV, and then it stops.

Its replicas drain: placement moves their requests to replicas with room, and their stages to others. What is left when
the time is up is not lost: the last poll publishes all tokens, and other replicas resume from them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from infra.transport.kv_transfer import KVTransfers
from operators.rollout.replica import Replica

RESERVE_S = 5.0
"""Of the notice, the time in which the last tokens are published and the process ends."""
SETTLE_S = 2.0
"""An idle process waits at least so long: assignments that were sent before placement knew are still to arrive."""


class Notice(Protocol):
    """As `infra.runners.stopping.TerminationNotice`."""

    @property
    def given_at(self) -> float | None: ...

    def end(self) -> None: ...


class Departure:
    """Drains `replicas` once notice is given, for `notice_s` seconds at most, and keeps KV that others may fetch."""

    def __init__(
        self,
        notice: Notice,
        notice_s: float,
        replicas: Collection[Replica],
        kv_transfers: KVTransfers | None,
        clock: Callable[[], float],
    ) -> None:
        self._notice, self._notice_s, self._clock = notice, notice_s, clock
        self._replicas, self._kv_transfers = replicas, kv_transfers
        self._deadline: float | None = None
        self._settled_at = 0.0

    def begin(self) -> bool:
        """Drain the replicas if notice was given. Returns True once, when they begin to."""
        given_at = self._notice.given_at
        if self._deadline is not None or given_at is None:
            return False
        self._deadline = given_at + max(0.0, self._notice_s - RESERVE_S)
        self._settled_at = self._clock() + SETTLE_S
        for replica in self._replicas:
            replica.drain()
        return True

    def end_if_done(self, *, published: bool) -> None:
        """Stop the process if all work has left and is `published`, or if the time is up."""
        if self._deadline is None:
            return
        offers = self._kv_transfers is not None and self._kv_transfers.offers
        left = not published or offers or any(map(_in_use, self._replicas))
        now = self._clock()
        if now >= self._deadline or (not left and now >= self._settled_at):
            self._notice.end()


def _in_use(replica: Replica) -> bool:
    """Whether it has requests, or a stage with those of another replica."""
    return not replica.idle or (replica.staging is not None and replica.staging.serving)
