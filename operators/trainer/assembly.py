"""Global batches from their parts: a batch is whole when every part has come."""

from __future__ import annotations

from dataclasses import dataclass, replace

from schemas.records import MicroBatch


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """Global batch `number`; reading goes on at `next_offset` of its partition once it is trained."""

    number: int
    parts: tuple[MicroBatch, ...]
    next_offset: int


class BatchAssembly:
    """Collects the parts of one rank, or those that were made for `ranks`, as if they had been made for one.

    A batch is one transaction, so parts of two batches never mix in a partition.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks
        self._parts: dict[int, dict[int, MicroBatch]] = {}

    def add(self, part: MicroBatch, partition: int, offset: int) -> list[WholeBatch]:
        """Take a part; the batch that it completes, if it does."""
        parts = self._parts.setdefault(part.batch, {})
        if self._ranks > 1:
            part = replace(part, rank=0, index=part.rank * part.count + part.index, count=part.count * self._ranks)
        parts[part.index] = part
        if len(parts) < part.count:
            return []
        del self._parts[part.batch]
        ordered = tuple(parts[index] for index in sorted(parts))
        return [WholeBatch(part.batch, ordered, offset + 1)]
