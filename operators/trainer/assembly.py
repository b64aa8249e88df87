"""Assembles global batches from the parts in the batches topic: in the order of their numbers, each number once.

The buffer writes one batch after the other, each in one transaction. So every partition holds the batches in order, and
the parts of each batch from first to last. A part that violates this order is never trained: a repeated number, or a
part that continues no batch, is rejected with a reason. A gap is a later batch in the log without the next one: the log
has lost records.

Acceptance depends on each partition's records alone, so every rank, every start and a replay accept the same batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from operators.io.elements import Output
from schemas.records import DeadLetter, MicroBatch
from schemas.topics import BATCHES, DEAD_LETTERS

MAX_UNFINISHED = 4
"""Incomplete batches of one number kept per partition at a time. The buffer itself leaves none incomplete."""


class CannotTrain(RuntimeError):
    """Each start of the trainer would fail in this way. The message names the batch, setting or model, and a remedy."""


class MissingBatch(CannotTrain):
    """The log has lost global batch `number`, if the buffer has made it; `later` names a later one that the log has."""

    def __init__(self, text: str, number: int = 0, later: str = "") -> None:
        super().__init__(text)
        self.number, self.later = number, later


class RejectedMicroBatch(NamedTuple):
    """A part that was not accepted, and the reason."""

    partition: int
    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """Global batch `number`. Once it is trained, reading continues at `next_offsets` of its partitions.

    It has no parts if the log has lost it and `trainer.lost_batches` names it.
    """

    number: int
    parts: tuple[MicroBatch, ...]
    next_offsets: tuple[int, ...]


def empty_reason(parts: Collection[MicroBatch]) -> str:
    """Why a batch with `parts` has no trajectory to train."""
    return "the batch has no trajectory" if parts else "trainer.lost_batches names the batch"


class BatchAssembly:
    """Assembles the batches from number `first` on; each of `partitions` holds a part of every batch.

    The parts of a whole batch are in the order of the partitions. Each share of a batch has a partition for each of
    the buffer's `divisions`, so partition p is of share p // `divisions`. Batches whose numbers are in `lost` are
    skipped. `starts` are the offsets at which reading begins, in the order of `partitions` (default: 0).
    """

    def __init__(
        self,
        partitions: Iterable[int] = (0,),
        *,
        divisions: int = 1,
        first: int = 0,
        lost: Collection[int] = (),
        starts: Iterable[int] | None = None,
    ) -> None:
        numbers = tuple(partitions)
        self._lost, self._next = frozenset(lost), first
        offsets = (0,) * len(numbers) if starts is None else tuple(starts)
        self._partitions = {
            partition: _Partition(partition, partition // divisions, first, self._lost, offset)
            for partition, offset in zip(numbers, offsets, strict=True)
        }
        self.rejected: list[RejectedMicroBatch] = []
        """The parts rejected since the caller last cleared this list."""

    def add(self, part: MicroBatch, partition: int, offset: int) -> list[WholeBatch]:
        """Add a part and return the batches that it completes. Raises KeyError for a partition of another rank."""
        self.rejected += self._partitions[partition].add(part, offset)
        return self.take()

    def take(self) -> list[WholeBatch]:
        """Return the complete batches not returned before, in order. Lost batches count as complete."""
        partitions, found = self._partitions.values(), list[WholeBatch]()
        while self._next in self._lost or all(partition.whole for partition in partitions):
            parts: list[MicroBatch] = []
            if self._next not in self._lost:
                for partition in partitions:
                    parts += partition.take()
            if len(partitions) > 1:
                parts = [replace(part, index=index, count=len(parts)) for index, part in enumerate(parts)]
            found.append(WholeBatch(self._next, tuple(parts), tuple(partition.next_offset for partition in partitions)))
            self._next += 1
        return found

    def missing(self) -> MissingBatch | None:
        """The error to raise if a partition holds a later batch instead of its next one; None if there is no gap."""
        for partition in self._partitions.values():
            if partition.later_parts:
                return partition.missing()
        return None


class _Partition:
    """The batches of one partition, of share `share`. `later_parts` are the number and offset of each part of a batch
    after the next."""

    def __init__(self, partition: int, share: int, first: int, lost: frozenset[int], start: int) -> None:
        self._partition, self._share, self._lost = partition, share, lost
        self._next = first
        self._whole: deque[tuple[list[MicroBatch], int]] = deque()
        self._unfinished: list[list[tuple[MicroBatch, int]]] = []
        self.later_parts: list[tuple[int, int]] = []
        self.next_offset = start
        self._pass_over_lost()

    @property
    def whole(self) -> bool:
        return bool(self._whole)

    def take(self) -> list[MicroBatch]:
        """Remove and return the parts of the oldest whole batch."""
        parts, self.next_offset = self._whole.popleft()
        return parts

    def add(self, part: MicroBatch, offset: int) -> Iterator[RejectedMicroBatch]:
        """Add a part and yield the parts that are rejected because of it."""
        if (reason := self._invalid(part)) is not None:
            yield self._reject(offset, reason)
        elif part.batch in self._lost:
            yield self._reject(offset, f"batch {part.batch} is one of trainer.lost_batches")
        elif part.batch < self._next:
            yield self._reject(offset, f"batch {part.batch} was accepted before, the next one is {self._next}")
        elif part.batch > self._next:
            self.later_parts.append((part.batch, offset))
        else:
            yield from self._append(part, offset)

    def missing(self) -> MissingBatch:
        """The error for the batch that this partition lacks."""
        (found, offset), where = self.later_parts[0], f"{BATCHES.short_name} partition {self._partition}"
        return MissingBatch(
            f"global batch {self._next} is missing in {where}: batch {found} is at offset {offset}, and batch "
            f"{self._next} is neither before nor after it. The log has lost records, or another writer than the buffer "
            f"wrote that record. Read it with `laminar topics tail {BATCHES.short_name}`. To train without the "
            f"batch, set trainer.lost_batches = [{self._next}] and resume the run",
            self._next,
            f"batch {found} is at offset {offset} of {where}",
        )

    def _invalid(self, part: MicroBatch) -> str | None:
        if part.rank != self._share:
            return f"a part of share {part.rank} in a partition of share {self._share}"
        if part.batch < 0 or not 0 <= part.index < part.count:
            return f"part {part.index} of {part.count} of batch {part.batch} is out of range"
        return None

    def _append(self, part: MicroBatch, offset: int) -> Iterator[RejectedMicroBatch]:
        """Add a part of the next batch: part 0 begins a candidate, any other part continues one."""
        if part.index == 0:
            parts: list[tuple[MicroBatch, int]] = []
            self._unfinished.append(parts)
            if len(self._unfinished) > MAX_UNFINISHED:
                yield from self._reject_parts(self._unfinished.pop(0))
        else:
            same_count = (each for each in reversed(self._unfinished) if each[0][0].count == part.count)
            found = next((each for each in same_count if len(each) == part.index), None)
            if found is None:
                yield self._reject(
                    offset, f"part {part.index} of {part.count} of batch {part.batch} continues no batch"
                )
                return
            parts = found
        parts.append((part, offset))
        if len(parts) == part.count:
            yield from self._complete(parts)

    def _complete(self, parts: list[tuple[MicroBatch, int]]) -> Iterator[RejectedMicroBatch]:
        """Accept a complete batch; reject the other candidates of its number and the parts that came too early."""
        self._whole.append(([part for part, _ in parts], parts[-1][1] + 1))
        unfinished, self._unfinished = self._unfinished, []
        for other in unfinished:
            if other is not parts:
                yield from self._reject_parts(other)
        later_parts, self.later_parts = self.later_parts, []
        for number, offset in later_parts:
            yield self._reject(offset, f"batch {number} arrived before batch {self._next}")
        self._next += 1
        self._pass_over_lost()

    def _reject_parts(self, parts: list[tuple[MicroBatch, int]]) -> Iterator[RejectedMicroBatch]:
        for part, offset in parts:
            reason = f"part {part.index} of {part.count} of batch {part.batch}, whose other parts never arrived"
            yield self._reject(offset, reason)

    def _pass_over_lost(self) -> None:
        while self._next in self._lost:
            self._next += 1

    def _reject(self, offset: int, reason: str) -> RejectedMicroBatch:
        return RejectedMicroBatch(self._partition, offset, reason)


def dead_letters(rejected: Iterable[RejectedMicroBatch], now: int) -> list[Output]:
    """A dead letter for each of `rejected`, at `now` in Unix milliseconds."""
    topic = BATCHES.short_name
    return [
        Output(DEAD_LETTERS, topic, DeadLetter("train", reason, topic, partition, offset, b"", now))
        for partition, offset, reason in rejected
    ]
