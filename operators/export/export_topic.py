"""The export step: rows of a topic gathered into files, each of a range of offsets of one partition.

A thread of its own writes one file while the next is gathered. What may be committed as done is what lies in files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby

import pyarrow as pa

from operators.export.columns import RecordRows, as_table
from operators.export.config import ExportConfig
from operators.export.folder import ExportFolder, next_offsets
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, ReceivedRecord, Restored
from schemas.block import Block


@dataclass(frozen=True)
class ExportTopic:
    """The step: it writes nothing to Kafka."""

    config: ExportConfig
    clock: Callable[[], float] = time.monotonic

    def restore(self, restored: Restored) -> Exporting:
        """Raises ExportError where the folder cannot be written to."""
        return Exporting(self.config, self.clock)


@dataclass
class _Gathered:
    """What is to go into the next file of one partition, whose first offset is `first`."""

    first: int
    tables: list[pa.Table] = field(default_factory=list)
    undecodable: list[tuple[int, str]] = field(default_factory=list)
    records: int = 0


class Exporting:
    """What one start has gathered and not written yet."""

    def __init__(self, config: ExportConfig, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self._contents = config.contents
        self._folder = ExportFolder(config.folder, config.contents)
        self._done = next_offsets(self._folder.contents, self._folder.parts)
        self._gathered = {partition: _Gathered(offset) for partition, offset in self._done.items()}
        self._bytes = 0
        self._since = clock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="export")
        self._writing: Future[dict[int, int]] | None = None

    def fold(self, polled: Polled) -> Sequence[Output]:
        """Gather the rows of `polled`; raises ExportError where a file could not be written."""
        self._gather(polled)
        positions = {place.partition: offset for place, offset in polled.positions.items()}
        if polled.last:
            self._write(positions)
            self._settle()
        elif self._bytes >= self._config.file_bytes or self._is_due():
            self._write(positions)
        elif self._writing is not None and self._writing.done():
            self._settle()
        return ()

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        """What lies in files is done."""
        return Checkpoint(
            {PartitionKey(self._contents.topic, partition): offset for partition, offset in self._done.items()}
        )

    def busy(self) -> bool:
        """It waits for records alone."""
        return False

    def close(self) -> None:
        """Wait for a file under way; what has been gathered is read again by the next start."""
        self._writer.shutdown()
        self._folder.close()

    def _gather(self, polled: Polled) -> None:
        placed: dict[int, list[RecordRows]] = {}
        for (partition, _), rows in groupby(polled.records, lambda received: (received.partition, received.offset)):
            placed.setdefault(partition, []).append(_placed(list(rows)))
        for partition, blocks in placed.items():
            gathered = self._gathered[partition]
            gathered.records += len(blocks)
            kept = self._contents.kept(as_table(self._contents.of, partition, blocks))
            if len(kept):
                gathered.tables.append(kept)
                self._bytes += kept.nbytes
        for letter in polled.rejected:
            self._gathered[letter.partition].undecodable.append((letter.offset, letter.reason))

    def _is_due(self) -> bool:
        there = any(each.records or each.undecodable for each in self._gathered.values())
        if not there or not self._config.follow:
            self._since = self._clock()
        return self._clock() - self._since >= self._config.every_s

    def _write(self, positions: Mapping[int, int]) -> None:
        """Begin to write what has been gathered, up to `positions`, the file before it being done."""
        self._settle()
        ready = {
            partition: gathered
            for partition, gathered in self._gathered.items()
            if (gathered.records or gathered.undecodable) and positions[partition] > gathered.first
        }
        if ready:
            self._gathered |= {partition: _Gathered(positions[partition]) for partition in ready}
            self._bytes, self._since = 0, self._clock()
            self._writing = self._writer.submit(self._write_files, ready, dict(positions))

    def _write_files(self, ready: Mapping[int, _Gathered], positions: Mapping[int, int]) -> dict[int, int]:
        done = {}
        for partition, gathered in ready.items():
            kept = pa.concat_tables(gathered.tables) if gathered.tables else self._empty()
            last = positions[partition] - 1
            self._folder.add(partition, gathered.first, last, self._contents.made(kept), gathered.undecodable)
            done[partition] = last + 1
        return done

    def _empty(self) -> pa.Table:
        return as_table(self._contents.of, 0, ())

    def _settle(self) -> None:
        """Wait for the file under way. Raises ExportError where it could not be written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._done = {**self._done, **writing.result()}


def _placed(rows: Sequence[ReceivedRecord]) -> RecordRows:
    """The rows of one Kafka record: a block of them, or one by one."""
    first = rows[0]
    block = first.record if isinstance(first.record, Block) else Block.of([row.record for row in rows])
    return RecordRows.of_one(block, first.offset, first.timestamp)
