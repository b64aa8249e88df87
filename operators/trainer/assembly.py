"""Global batches from the parts in the batches topic: accepted in the order of their numbers, each number once.

The buffer writes batch after batch, each in one transaction, so every partition holds the batches in their order and
the parts of each from the first to the last. What does not follow from that order is never trained. A repeated number
and a part that belongs nowhere are refused, each with its reason. A number that is missing is a gap: a later batch
stands in the log and the next one does not, so records were lost.

What is accepted is a function of each partition's records alone, so every rank, every start and a replay accept alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from schemas.records import MicroBatch
from schemas.topics import BATCHES

MAX_UNFINISHED = 4
"""Batches of one number that may be incomplete in a partition at a time: the buffer leaves none incomplete."""


class MissingBatch(RuntimeError):
    """The log has lost a global batch; the message says which, where, and how to go on."""


class RejectedMicroBatch(NamedTuple):
    """A part that was not accepted, and why."""

    partition: int
    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """Global batch `number`; reading goes on at `next_offsets` of its partitions once it is trained.

    It has no parts where the log has lost it, and the configuration says to go on without it.
    """

    number: int
    parts: tuple[MicroBatch, ...]
    next_offsets: tuple[int, ...]


class BatchAssembly:
    """Collects the batches from number `first` on, of which there is a share in each of `partitions`.

    The parts of a whole batch stand in the order of the partitions. `shards` of the buffer write for each rank, so
    partition p belongs to rank p // `shards`. Batches of numbers in `lost` are passed over. `starts` are where reading
    begins, by partition in the order of `partitions` (default: 0).
    """

    def __init__(
        self,
        partitions: Iterable[int] = (0,),
        *,
        shards: int = 1,
        first: int = 0,
        lost: Collection[int] = (),
        starts: Iterable[int] | None = None,
    ) -> None:
        numbers = tuple(partitions)
        self._lost, self._next = frozenset(lost), first
        offsets = (0,) * len(numbers) if starts is None else tuple(starts)
        self._shares = {
            partition: _Partition(partition, partition // shards, first, self._lost, offset)
            for partition, offset in zip(numbers, offsets, strict=True)
        }
        self.rejected: list[RejectedMicroBatch] = []
        """What was refused since this list was emptied."""

    def add(self, part: MicroBatch, partition: int, offset: int) -> list[WholeBatch]:
        """Take a part; the batches that are whole by it. Raises KeyError for another partition's."""
        self.rejected += self._shares[partition].add(part, offset)
        return self.take()

    def take(self) -> list[WholeBatch]:
        """The batches that are whole and were not taken, in their order; lost ones are whole at once."""
        shares, found = self._shares.values(), list[WholeBatch]()
        while self._next in self._lost or all(share.whole for share in shares):
            parts: list[MicroBatch] = []
            if self._next not in self._lost:
                for share in shares:
                    parts += share.take()
            if len(shares) > 1:
                parts = [replace(part, index=index, count=len(parts)) for index, part in enumerate(parts)]
            found.append(WholeBatch(self._next, tuple(parts), tuple(share.taken_to for share in shares)))
            self._next += 1
        return found

    def missing(self) -> MissingBatch | None:
        """The error to raise where a partition holds a later batch in the place of its next one; None: no gap."""
        for share in self._shares.values():
            if share.ahead:
                return share.missing()
        return None


class _Partition:
    """The batches of one partition. `ahead` are parts of later batches than the next: number and offset of each."""

    def __init__(self, partition: int, rank: int, first: int, lost: frozenset[int], start: int) -> None:
        self._partition, self._rank, self._lost = partition, rank, lost
        self._next = first
        self._whole: deque[tuple[list[MicroBatch], int]] = deque()
        self._unfinished: list[list[tuple[MicroBatch, int]]] = []
        self.ahead: list[tuple[int, int]] = []
        self.taken_to = start
        self._pass_over_lost()

    @property
    def whole(self) -> bool:
        return bool(self._whole)

    def take(self) -> list[MicroBatch]:
        """The parts of the oldest whole batch."""
        parts, self.taken_to = self._whole.popleft()
        return parts

    def add(self, part: MicroBatch, offset: int) -> Iterator[RejectedMicroBatch]:
        """Take a part in; what is refused by it."""
        if (reason := self._implausible(part)) is not None:
            yield self._refuse(offset, reason)
        elif part.batch in self._lost:
            yield self._refuse(offset, f"batch {part.batch} is one of trainer.lost_batches")
        elif part.batch < self._next:
            yield self._refuse(offset, f"batch {part.batch} was accepted before, the next one is {self._next}")
        elif part.batch > self._next:
            self.ahead.append((part.batch, offset))
        else:
            yield from self._follow(part, offset)

    def missing(self) -> MissingBatch:
        """The error that says what is missing here."""
        (found, offset), where = self.ahead[0], f"{BATCHES.short_name} partition {self._partition}"
        return MissingBatch(
            f"global batch {self._next} is missing in {where}: batch {found} stands at offset {offset}, and batch "
            f"{self._next} neither before it nor after it. The log has lost records, or something else than the buffer "
            f"wrote that record. Read it with `laminar topics tail {BATCHES.short_name}`; to train on without the "
            f"batch set trainer.lost_batches = [{self._next}] and resume the run"
        )

    def _implausible(self, part: MicroBatch) -> str | None:
        if part.rank != self._rank:
            return f"a part for rank {part.rank} in a partition of rank {self._rank}"
        if part.batch < 0 or not 0 <= part.index < part.count:
            return f"part {part.index} of {part.count} of batch {part.batch} cannot be"
        return None

    def _follow(self, part: MicroBatch, offset: int) -> Iterator[RejectedMicroBatch]:
        """Take in a part of the next batch: its first part begins it, any other follows the one before."""
        if part.index == 0:
            parts: list[tuple[MicroBatch, int]] = []
            self._unfinished.append(parts)
            if len(self._unfinished) > MAX_UNFINISHED:
                yield from self._drop(self._unfinished.pop(0))
        else:
            fitting = (each for each in reversed(self._unfinished) if _fits(part, each))
            found = next(fitting, None)
            if found is None:
                yield self._refuse(offset, f"part {part.index} of {part.count} of batch {part.batch} follows no part")
                return
            parts = found
        parts.append((part, offset))
        if len(parts) == part.count:
            yield from self._complete(parts)

    def _complete(self, parts: list[tuple[MicroBatch, int]]) -> Iterator[RejectedMicroBatch]:
        """A batch is whole: what else claimed its number, or came too early, is no part of any."""
        self._whole.append(([part for part, _ in parts], parts[-1][1] + 1))
        unfinished, self._unfinished = self._unfinished, []
        for other in unfinished:
            if other is not parts:
                yield from self._drop(other)
        ahead, self.ahead = self.ahead, []
        for number, offset in ahead:
            yield self._refuse(offset, f"batch {number} came before batch {self._next}")
        self._next += 1
        self._pass_over_lost()

    def _drop(self, parts: list[tuple[MicroBatch, int]]) -> Iterator[RejectedMicroBatch]:
        for part, offset in parts:
            reason = f"part {part.index} of {part.count} of batch {part.batch}, of which the other parts never came"
            yield self._refuse(offset, reason)

    def _pass_over_lost(self) -> None:
        while self._next in self._lost:
            self._next += 1

    def _refuse(self, offset: int, reason: str) -> RejectedMicroBatch:
        return RejectedMicroBatch(self._partition, offset, reason)


def _fits(part: MicroBatch, before: list[tuple[MicroBatch, int]]) -> bool:
    return len(before) == part.index and before[0][0].count == part.count
