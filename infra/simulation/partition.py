"""One partition of a topic as its leader keeps it: records, transaction markers, and the state of each producer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

from infra.simulation.errors import InvalidProducerEpoch, OffsetOutOfRange, OutOfOrderSequence

_BASE = attrgetter("base")
REMEMBERED_BATCHES = 5
"""The number of batches per producer whose repetition the broker recognises."""


class ProducerKey(NamedTuple):
    """A producer as a request names it."""

    producer_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """The records of one request, from offset `base` on. A marker is one record, and `commits` says what it does.

    None is a record that was compacted away.
    """

    base: int
    values: tuple[Any, ...]
    producer: ProducerKey | None = None
    commits: bool | None = None

    @property
    def end(self) -> int:
        """The offset after the last record."""
        return self.base + max(1, len(self.values))

    @property
    def records(self) -> list[tuple[int, Any]]:
        """Offset and value of each record; none of a marker."""
        if self.commits is not None:
            return []
        return [(offset, value) for offset, value in enumerate(self.values, self.base) if value is not None]


@dataclass(slots=True)
class _Producer:
    """The leader's state of a producer: its newest epoch, its last batches, its open transaction."""

    epoch: int
    batches: list[tuple[int, int, int]] = field(default_factory=list)
    """The first sequence number, the last one, and the offset of each remembered batch."""
    open_from: int | None = None


class PartitionLog:
    """The log of one partition."""

    def __init__(self) -> None:
        self.begin = 0
        self.end = 0
        self._batches: list[StoredBatch] = []
        self._producers: dict[int, _Producer] = {}
        self._aborted: list[tuple[int, int, int]] = []
        """Producer id, first offset and marker offset of each aborted transaction."""
        self._attempts: dict[int, tuple[int, int]] = {}
        """Epoch and lowest sequence number of each producer's batches that wait for the check of their transaction."""

    @property
    def stable_end(self) -> int:
        """The last stable offset: the first offset of the oldest open transaction, or the end."""
        return min(
            (each.open_from for each in self._producers.values() if each.open_from is not None), default=self.end
        )

    def is_open(self, producer: ProducerKey) -> bool:
        """Whether `producer` has an open transaction here, in its present epoch."""
        known = self._producers.get(producer.producer_id)
        return known is not None and known.open_from is not None and known.epoch == producer.epoch

    def open_producers(self) -> list[int]:
        """The producer ids of the open transactions."""
        return sorted(number for number, each in self._producers.items() if each.open_from is not None)

    def copy(self) -> PartitionLog:
        """The log as it is now."""
        return deepcopy(self, {id(batch): batch for batch in self._batches})

    def attempt(self, producer: ProducerKey, sequence: int) -> None:
        """Note that a batch will begin a transaction here if its coordinator confirms it."""
        known = self._producers.get(producer.producer_id)
        if known is not None and known.open_from is not None:
            return
        epoch, lowest = self._attempts.get(producer.producer_id, (producer.epoch, sequence))
        if producer.epoch >= epoch:
            lowest = min(lowest, sequence) if producer.epoch == epoch else sequence
            self._attempts[producer.producer_id] = producer.epoch, lowest

    def append(self, values: Sequence[Any], producer: ProducerKey | None = None, sequence: int = 0) -> int:
        """Append records, transactional ones if there is a `producer`; return the offset of the first.

        A repetition of a remembered batch returns the offset of the original. Raises InvalidProducerEpoch, and
        OutOfOrderSequence for a gap or an older repetition.
        """
        if producer is not None:
            known = self._producers.get(producer.producer_id)
            if (found := _repeated(known, producer, sequence, len(values))) is not None:
                return found
            _check_sequence(known, producer, sequence, self._attempts.get(producer.producer_id))
            self._attempts.pop(producer.producer_id, None)
            if known is None:
                known = self._producers[producer.producer_id] = _Producer(producer.epoch)
            elif known.epoch != producer.epoch:
                known.epoch, known.batches = producer.epoch, []
            known.batches.append((sequence, sequence + len(values) - 1, self.end))
            del known.batches[:-REMEMBERED_BATCHES]
            if known.open_from is None:
                known.open_from = self.end
        return self._store(StoredBatch(self.end, tuple(values), producer))

    def end_transaction(self, producer: ProducerKey, *, commit: bool) -> None:
        """Append a marker. Raises InvalidProducerEpoch if the producer has a newer epoch here."""
        known = self._producers.setdefault(producer.producer_id, _Producer(producer.epoch))
        if producer.epoch < known.epoch:
            raise InvalidProducerEpoch(f"the marker has epoch {producer.epoch}, the producer {known.epoch}")
        if known.epoch != producer.epoch:
            known.epoch, known.batches = producer.epoch, []
        if known.open_from is not None and not commit:
            self._aborted.append((producer.producer_id, known.open_from, self.end))
        known.open_from = None
        self._attempts.pop(producer.producer_id, None)
        self._store(StoredBatch(self.end, (), producer, commit))

    def fetch(self, offset: int, *, committed: bool) -> list[tuple[int, Any]]:
        """The offsets and values from `offset` on: to the end, or only `committed` ones. Raises OffsetOutOfRange."""
        return [
            (at, value)
            for batch in self.batches(offset, committed=committed)
            for at, value in batch.records
            if at >= offset
        ]

    def batches(self, offset: int, *, committed: bool) -> Iterator[StoredBatch]:
        """The batches and markers from the one with `offset` on, without aborted ones if `committed`.

        Raises OffsetOutOfRange.
        """
        if not self.begin <= offset <= self.end:
            raise OffsetOutOfRange(f"{offset} is not in {self.begin} to {self.end}")
        last = self.stable_end if committed else self.end
        first = max(0, bisect_right(self._batches, offset, key=_BASE) - 1)
        for batch in self._batches[first : bisect_left(self._batches, last, key=_BASE)]:
            if batch.end > offset and not (committed and self._is_aborted(batch)):
                yield batch

    def delete_before(self, offset: int) -> None:
        """Delete the records before `offset`. Raises OffsetOutOfRange beyond the end."""
        if offset > self.end:
            raise OffsetOutOfRange(f"{offset} is beyond the end, {self.end}")
        self.begin = max(self.begin, offset)
        self._batches = [batch for batch in self._batches if batch.end > self.begin]

    def compact(self, key_of: Callable[[Any], Any]) -> None:
        """Remove, before the last stable offset, what was aborted and all but the newest record of each key, as the
        broker's cleaner does. All offsets remain.
        """
        last, newest = self.stable_end, dict[Any, int]()
        for batch in self.batches(self.begin, committed=True):
            newest |= {key_of(value): offset for offset, value in batch.records}
        kept = set(newest.values())

        def compacted(batch: StoredBatch) -> StoredBatch | None:
            offsets = range(batch.base, batch.end)
            if batch.commits is not None or batch.base >= last or kept.issuperset(offsets):
                return batch
            if kept.isdisjoint(offsets):
                return None
            values = zip(offsets, batch.values, strict=True)
            return replace(batch, values=tuple(value if at in kept else None for at, value in values))

        self._batches = [left for batch in self._batches if (left := compacted(batch)) is not None]

    def _store(self, batch: StoredBatch) -> int:
        self._batches.append(batch)
        self.end = batch.end
        return batch.base

    def _is_aborted(self, batch: StoredBatch) -> bool:
        return (
            batch.producer is not None
            and batch.commits is None
            and any(
                number == batch.producer.producer_id and first <= batch.base < marker
                for number, first, marker in self._aborted
            )
        )


def _repeated(known: _Producer | None, producer: ProducerKey, sequence: int, count: int) -> int | None:
    """The offset of the remembered batch with the same sequence numbers and epoch."""
    if known is None or known.epoch != producer.epoch:
        return None
    return next(
        (offset for first, last, offset in known.batches if (first, last) == (sequence, sequence + count - 1)), None
    )


def _check_sequence(
    known: _Producer | None, producer: ProducerKey, sequence: int, attempt: tuple[int, int] | None
) -> None:
    if known is not None and producer.epoch < known.epoch:
        raise InvalidProducerEpoch(f"epoch {producer.epoch}, while the last was {known.epoch}")
    if attempt is not None and sequence > attempt[1]:
        raise OutOfOrderSequence(f"sequence {sequence}, although {attempt[1]} was tried before")
    if known is None:
        return
    if producer.epoch > known.epoch:
        if sequence != 0:
            raise OutOfOrderSequence(f"a new epoch begins with sequence {sequence}")
        return
    last = known.batches[-1][1] if known.batches else -1
    if sequence != last + 1:
        raise OutOfOrderSequence(f"sequence {sequence} after {last}")
