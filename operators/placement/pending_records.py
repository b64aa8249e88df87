"""Records that a restart must read again while what they say of a trajectory is not said elsewhere."""

from __future__ import annotations

from operators.io.elements import PartitionKey, ReceivedRecord
from operators.io.pending import PendingOffsets


class PendingRecords:
    """One record a trajectory, by trajectory id; `pending` keeps its offset above the low-water mark."""

    def __init__(self, pending: PendingOffsets) -> None:
        self._pending = pending
        self._held: dict[str, tuple[PartitionKey, int]] = {}

    def hold(self, name: str, received: ReceivedRecord) -> None:
        """Keep what was `received` of trajectory `name`, instead of what was kept before."""
        place = PartitionKey(received.topic, received.partition)
        self._pending.add(place, received.offset)
        self.let_go(name)
        self._held[name] = (place, received.offset)

    def hold_first(self, name: str, received: ReceivedRecord) -> None:
        """Keep what was `received` of trajectory `name`, unless something before it is kept."""
        if name not in self._held:
            self.hold(name, received)

    def let_go(self, name: str) -> None:
        """Nothing more is needed of trajectory `name`."""
        held = self._held.pop(name, None)
        if held is not None:
            self._pending.remove(*held)
