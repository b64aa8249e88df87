"""Global batches from their parts: a batch is whole when every part has come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from schemas.records import MicroBatch


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """Global batch `number`; reading goes on at `next_offsets` of its partitions once it is trained."""

    number: int
    parts: tuple[MicroBatch, ...]
    next_offsets: tuple[int, ...]


class BatchAssembly:
    """Collects batches of which there is a share in each of `partitions`; parts stand in the order of these.

    Each partition has its shares in the order of the batches, so batches become whole in their order, and where reading
    stands after one it stands before the next in every partition.
    """

    def __init__(self, partitions: Iterable[int] = (0,)) -> None:
        self._partitions = tuple(partitions)
        self._shares: dict[int, dict[int, _Share]] = {}

    def add(self, part: MicroBatch, partition: int, offset: int) -> list[WholeBatch]:
        """Take a part; the batch that it completes, if it does. Raises KeyError for another partition's."""
        shares = self._shares.get(part.batch)
        if shares is None:
            shares = self._shares[part.batch] = {each: _Share() for each in self._partitions}
        shares[partition].add(part, offset)
        if not all(share.whole for share in shares.values()):
            return []
        del self._shares[part.batch]
        parts = [part for share in shares.values() for _, part in sorted(share.parts.items())]
        if len(shares) > 1:
            parts = [replace(each, index=index, count=len(parts)) for index, each in enumerate(parts)]
        return [WholeBatch(part.batch, tuple(parts), tuple(share.next_offset for share in shares.values()))]


class _Share:
    """What one partition has of a batch: one transaction."""

    __slots__ = ("count", "next_offset", "parts")

    def __init__(self) -> None:
        self.parts: dict[int, MicroBatch] = {}
        self.count = 1
        self.next_offset = 0

    @property
    def whole(self) -> bool:
        return len(self.parts) == self.count

    def add(self, part: MicroBatch, offset: int) -> None:
        self.parts[part.index] = part
        self.count, self.next_offset = part.count, offset + 1
