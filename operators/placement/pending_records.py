"""Records that a restart must read again until a later record supersedes them."""

from __future__ import annotations

from operators.io.elements import PartitionKey, ReceivedRecord
from operators.io.pending import PendingOffsets


class PendingRecords:
    """One record per trajectory, by trajectory id; `pending` keeps the low-water mark at or below it."""

    def __init__(self, pending: PendingOffsets) -> None:
        self._pending = pending
        self._kept: dict[str, tuple[PartitionKey, int]] = {}

    def keep(self, name: str, received: ReceivedRecord) -> None:
        """Keep the record of trajectory `name` instead of an earlier one."""
        key = PartitionKey(received.topic, received.partition)
        self._pending.add(key, received.offset)
        self.release(name)
        self._kept[name] = (key, received.offset)

    def keep_first(self, name: str, received: ReceivedRecord) -> None:
        """Keep the record of trajectory `name` unless an earlier one is kept."""
        if name not in self._kept:
            self.keep(name, received)

    def release(self, name: str) -> None:
        """Stop keeping the record of trajectory `name`, if there is one."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._pending.remove(*kept)
