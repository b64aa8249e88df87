"""The offsets of a group that its last commits moved and that Kafka's own tools do not see yet."""

from __future__ import annotations

import math

from kafka import OffsetAndMetadata, TopicPartition

from infra.kafka.session_config import Offsets, Partition

GROUP_OFFSETS_S = 1.0
"""How far the group's offsets may be behind the note."""


class GroupProgress:
    """When a group's offsets are written: at most one transaction a second has them, since they cost a third of it."""

    def __init__(self) -> None:
        self._moved: dict[Partition, int] = {}
        self._written: dict[Partition, int] = {}
        self._written_at = -math.inf

    def move(self, offsets: Offsets) -> None:
        """A commit has reached `offsets`."""
        self._moved |= offsets

    def due(self, now: float, last: bool = False) -> bool:
        """Whether to write them at `now` (seconds): since GROUP_OFFSETS_S, or at all before the `last` commit."""
        behind = any(self._written.get(partition) != offset for partition, offset in self._moved.items())
        return behind and (last or now - self._written_at >= GROUP_OFFSETS_S)

    def to_write(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """All offsets moved since the last write."""
        return {TopicPartition(*p): OffsetAndMetadata(offset, "", -1) for p, offset in self._moved.items()}

    def wrote(self, now: float) -> None:
        """Kafka has them since `now`, in seconds."""
        self._written |= self._moved
        self._moved, self._written_at = {}, now
