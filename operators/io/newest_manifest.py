"""The newest manifest of the relay topic. A restart reads it again: stage groups need it while its version arrives."""

from __future__ import annotations

from collections.abc import Mapping

from operators.io.elements import PartitionKey, ReceivedRecord
from schemas.records import PolicyVersion
from schemas.topics import RELAY

_PLACE = PartitionKey(RELAY.short_name, 0)


class NewestManifest:
    """The offset of the manifest of the newest version that was read."""

    def __init__(self) -> None:
        self._found: tuple[PolicyVersion, int] | None = None

    def record(self, received: ReceivedRecord) -> None:
        """Record a received manifest."""
        version = received.record.version
        if self._found is None or version > self._found[0]:
            self._found = version, received.offset

    def low_water(self, positions: Mapping[PartitionKey, int]) -> dict[PartitionKey, int]:
        """`positions` (the next offsets to read), with that of the manifest for its topic."""
        return {**positions} if self._found is None else {**positions, _PLACE: self._found[1]}
