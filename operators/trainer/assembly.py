"""Global batches from their parts: a batch is whole when every part has come."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.records import MicroBatch


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """Global batch `number`; reading goes on at `next_offset` of its partition once it is trained."""

    number: int
    parts: tuple[MicroBatch, ...]
    next_offset: int


class BatchAssembly:
    """Collects the parts of one rank. A batch is one transaction, so parts of two batches never mix in a partition."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, MicroBatch]] = {}

    def add(self, part: MicroBatch, partition: int, offset: int) -> list[WholeBatch]:
        """Take a part; the batch that it completes, if it does."""
        parts = self._parts.setdefault(part.batch, {})
        parts[part.index] = part
        if len(parts) < part.count:
            return []
        del self._parts[part.batch]
        ordered = tuple(parts[index] for index in sorted(parts))
        return [WholeBatch(part.batch, ordered, offset + 1)]
