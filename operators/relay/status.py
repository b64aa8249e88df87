"""The heartbeats of a relay: the state of its data plane."""

from __future__ import annotations

import os
from collections.abc import Sequence

from infra.machine import machine_name
from infra.transport.relay_node import RelayNode
from schemas.records import PolicyVersion, RelayArrival, RelayStatus


class StatusMaker:
    """Builds the heartbeats of one relay; rates are averages since the previous heartbeat."""

    def __init__(self, node: RelayNode, store: str, now: float) -> None:
        self._node, self._store = node, store
        self._before = (now, 0, 0)
        self._reported = False

    def make(self, held: Sequence[PolicyVersion], size: int, now: float, wall_ms: int) -> RelayStatus:
        """Return the heartbeat at `now` (monotonic seconds) for `held` versions, newest first, of `size` bytes."""
        node = self._node
        received, sent = node.receiving.bytes_passed, node.sending.bytes_passed
        at, received_before, sent_before = self._before
        seconds = max(now - at, 1e-3)
        self._before = (now, received, sent)
        arrival = node.arriving()
        return RelayStatus(
            relay=node.relay,
            versions=tuple(map(str, held)),
            bytes=size,
            host=machine_name(),
            pid=os.getpid(),
            sent_at=wall_ms,
            address=node.address,
            store=self._store,
            arriving=arrival.version if arrival else None,
            arrived_bytes=arrival.arrived if arrival else 0,
            arriving_bytes=arrival.bytes if arrival else 0,
            received=received,
            sent=sent,
            received_per_s=(received - received_before) / seconds,
            sent_per_s=(sent - sent_before) / seconds,
            corrupted_chunks=node.counts.corrupted,
            lost_sources=node.counts.lost,
            chain_number=node.chain.number if node.chain else 0,
            unreachable=node.unreachable(),
        )

    def arrival(self, status: RelayStatus) -> RelayArrival | None:
        """The arrived chunks of the version that is being fetched, with the rates of `status`.

        Once the fetch has ended an empty record follows; then None.
        """
        now, rate = self._node.arriving(), status.received_per_s
        reported, self._reported = self._reported, now is not None
        if now is None and not reported:
            return None
        left = -1.0 if now is None or rate <= 0 else (now.bytes - now.arrived) / rate
        return RelayArrival(
            relay=status.relay,
            host=status.host,
            store=status.store,
            version=None if now is None else now.version,
            chunks=() if now is None else now.chunks,
            bytes_per_s=rate,
            seconds_left=left,
            sent_at=status.sent_at,
        )
