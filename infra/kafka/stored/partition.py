"""One partition in the files of a stopped broker: an index of its batches, with the outcomes of their transactions.

The index is made of the batches' headers (record batch version 2); the records are read on demand. A broker that was
killed may leave an incomplete batch at the end, which Kafka's recovery would cut off: the log ends before it.
"""

from __future__ import annotations

import mmap
import re
import struct
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator
from pathlib import Path

from kafka.errors import CorruptRecordError
from kafka.record.default_records import DefaultRecordBatch

_HEADER = struct.Struct(">qiibIhiqqqhii")
_OVERHEAD = struct.calcsize(">qi")
"""Bytes before the part that the batch's length counts."""
_TRANSACTIONAL, _CONTROL = 0x10, 0x20
_ABORT, _COMMIT = 0, 1
_SEGMENT = re.compile(r"\d{20}\.log")


class StoredPartition:
    """The batches in `folder`, of a partition whose records begin at `begin` at the earliest.

    Raises OSError if a file cannot be read, CorruptRecordError if the broker was killed while it compacted.
    """

    def __init__(self, folder: Path, begin: int = 0) -> None:
        self.folder = folder
        self._data: list[mmap.mmap] = []
        self._last_offsets, self._times = array("q"), array("q")
        self._places, self._sizes, self._segments = array("q"), array("q"), array("q")
        self._flags, self._producers = array("h"), array("q")
        self.open: dict[int, int] = {}
        """The producers with an open transaction, and its first offset."""
        self.unended: dict[int, int] = {}
        """Those that were open when the broker stopped; `settle` does not end them."""
        self._aborted: list[tuple[int, int, int]] = []
        """Aborted transactions: producer, first offset, and the offset of the marker."""
        files = sorted(file for file in folder.iterdir() if _SEGMENT.fullmatch(file.name))
        if any(folder.glob("*.swap")):
            raise _damaged(folder, "the broker was killed while it compacted it")
        first = int(files[0].stem) if files else 0
        for file in files:
            self._index(file)
        self._cut_incomplete_end()
        self.beginning = max(begin, first)
        self.end = self._last_offsets[-1] + 1 if self._last_offsets else self.beginning
        self._find_transactions()
        self.unended = dict(self.open)

    def settle(self, committed: Collection[int]) -> None:
        """End the open transactions, whose markers are missing; those of the producers `committed` are committed."""
        for producer_id, first in self.open.items():
            if producer_id not in committed:
                self._aborted.append((producer_id, first, self.end))
        self.open.clear()

    def batches(self, first: int, *, committed: bool) -> Iterator[tuple[int, DefaultRecordBatch | None]]:
        """The batches with records at or after offset `first`, each with its last offset.

        With `committed`, None instead of a marker and of a batch whose transaction was not committed. Raises
        CorruptRecordError.
        """
        for at in range(bisect_left(self._last_offsets, first), len(self._last_offsets)):
            hidden = committed and (self._flags[at] & _CONTROL or not self._is_committed(at))
            yield self._last_offsets[at], None if hidden else self._batch(at)

    def first_at(self, time_ms: int) -> tuple[int, int] | None:
        """Offset and timestamp of the first record at `time_ms` or later, as Kafka's, markers included; None: none."""
        for at, newest in enumerate(self._times):
            if newest >= time_ms:
                for record in self._batch(at):
                    if record.timestamp >= time_ms:
                        return record.offset, record.timestamp
        return None

    def last_write(self, producer_id: int) -> int:
        """The time of the last batch of a producer, in Unix milliseconds; -1 if it has none."""
        times = (time for time, producer in zip(self._times, self._producers, strict=True) if producer == producer_id)
        return max(times, default=-1)

    def _index(self, file: Path) -> None:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            if not size:
                return
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._data.append(data)
        segment, at = len(self._data) - 1, 0
        while at + _HEADER.size <= size:
            base, length, _, magic, _, flags, delta, _, newest, producer_id, _, _, _ = _HEADER.unpack_from(data, at)
            end = at + _OVERHEAD + length
            if magic != 2 or length < _HEADER.size - _OVERHEAD or end > size:
                break
            self._last_offsets.append(base + delta)
            self._times.append(newest)
            self._places.append(at)
            self._sizes.append(end - at)
            self._segments.append(segment)
            self._flags.append(flags)
            self._producers.append(producer_id)
            at = end

    def _cut_incomplete_end(self) -> None:
        columns = (self._last_offsets, self._times, self._places, self._sizes, self._segments)
        if self._last_offsets and not self._read(len(self._last_offsets) - 1).validate_crc():
            for column in (*columns, self._flags, self._producers):
                column.pop()

    def _find_transactions(self) -> None:
        for at, flags in enumerate(self._flags):
            producer_id = self._producers[at]
            if flags & _CONTROL:
                marker = next(iter(self._batch(at)))
                if marker.type in (_ABORT, _COMMIT):
                    first = self.open.pop(producer_id, None)
                    if marker.type == _ABORT and first is not None:
                        self._aborted.append((producer_id, first, self._last_offsets[at]))
            elif flags & _TRANSACTIONAL:
                self.open.setdefault(producer_id, self._last_offsets[at - 1] + 1 if at else self.beginning)

    def _is_committed(self, at: int) -> bool:
        if not self._flags[at] & _TRANSACTIONAL:
            return True
        offset, producer_id = self._last_offsets[at], self._producers[at]
        return not any(producer_id == aborted and first <= offset <= end for aborted, first, end in self._aborted)

    def _read(self, at: int) -> DefaultRecordBatch:
        place = self._places[at]
        return DefaultRecordBatch(self._data[self._segments[at]][place : place + self._sizes[at]])

    def _batch(self, at: int) -> DefaultRecordBatch:
        batch = self._read(at)
        if not batch.validate_crc():
            raise _damaged(self.folder, f"the batch that ends at offset {self._last_offsets[at]} is damaged")
        return batch


def _damaged(folder: Path, why: str) -> CorruptRecordError:
    return CorruptRecordError(
        f"{folder}: {why}. Start the broker on this data, which recovers it: `laminar broker start "
        f"{folder.parent.parent}`, then name its address with --bootstrap-server"
    )
