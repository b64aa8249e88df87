"""The export step: collects the rows of a topic and writes them to files, each of an offset range of one partition.

A thread writes one file while the step collects the rows of the next. Only offsets in files are committed as done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby, islice

import pyarrow as pa

from infra.clocks import wall_ms
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import partition_ranges
from infra.kafka.topic_reader import StoredRecord, read_partition, read_rows
from infra.runners.step_metrics import phase
from infra.storage import StorageFolder
from operators.export.columns import RecordRows, as_table
from operators.export.config import Contents, ExportConfig
from operators.export.folder import (
    ExportError,
    ExportFolder,
    next_offsets,
    read_contents,
    read_parts,
    recorded_contents,
)
from operators.export.views import TEXT_VIEWS
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, ReceivedRecord, Restored, ShardFold
from schemas.block import Block
from schemas.block_codec import decode_as_blocks
from schemas.records import DeadLetter, Experience


@dataclass(frozen=True)
class ExportTopic:
    """The step. It writes nothing to Kafka."""

    config: ExportConfig
    clock: Callable[[], float] = time.monotonic

    def restore(self, restored: Restored) -> Exporting:
        """Open the folder. Raises ExportError if it cannot be written to."""
        return Exporting(self.config, self.clock)


@dataclass
class _PendingRows:
    """The rows for the next file of one partition, whose first offset is `first`."""

    first: int
    tables: list[pa.Table] = field(default_factory=list)
    undecodable: list[tuple[int, str]] = field(default_factory=list)
    records: int = 0


class Exporting(ShardFold):
    """The state of one start: the rows collected and not yet written."""

    def __init__(self, config: ExportConfig, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self._contents = config.contents
        self._folder = ExportFolder(config.folder, config.contents)
        self._done = next_offsets(self._folder.contents, self._folder.parts)
        self._pending = {partition: _PendingRows(offset) for partition, offset in self._done.items()}
        self._bytes = 0
        self._since = clock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="export")
        self._writing: Future[dict[int, int]] | None = None

    def fold(self, polled: Polled) -> Sequence[Output]:
        """Collect the rows of `polled`. Raises ExportError if a file could not be written."""
        with phase("collect rows"):
            self._add(polled)
        positions = {place.partition: offset for place, offset in polled.positions.items()}
        with phase("write files"):
            if polled.last:
                self._write(positions)
                self._await_write()
            elif self._bytes >= self._config.file_bytes or self._is_due():
                self._write(positions)
            elif self._writing is not None and self._writing.done():
                self._await_write()
        return ()

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        """The offsets that are in files."""
        return Checkpoint(
            {PartitionKey(self._contents.topic, partition): offset for partition, offset in self._done.items()}
        )

    def close(self) -> None:
        """Wait for the file being written. Rows not in files are read again by the next start."""
        self._writer.shutdown()
        self._folder.close()

    def _add(self, polled: Polled) -> None:
        records: dict[int, list[RecordRows]] = {}
        for (partition, _), rows in groupby(polled.records, lambda received: (received.partition, received.offset)):
            records.setdefault(partition, []).append(_record_rows(list(rows)))
        for partition, blocks in records.items():
            pending = self._pending[partition]
            pending.records += len(blocks)
            selected = self._contents.selected_rows(as_table(self._contents.source, partition, blocks))
            if len(selected):
                pending.tables.append(selected)
                self._bytes += selected.nbytes
        for dead_letter in polled.rejected:
            self._pending[dead_letter.partition].undecodable.append((dead_letter.offset, dead_letter.reason))

    def _is_due(self) -> bool:
        has_records = any(each.records or each.undecodable for each in self._pending.values())
        if not has_records or not self._config.follow:
            self._since = self._clock()
        return self._clock() - self._since >= self._config.every_s

    def _write(self, positions: Mapping[int, int]) -> None:
        """Start to write the collected rows up to `positions`, after the file being written is done."""
        self._await_write()
        ready = {
            partition: pending
            for partition, pending in self._pending.items()
            if (pending.records or pending.undecodable) and positions[partition] > pending.first
        }
        if ready:
            self._pending |= {partition: _PendingRows(positions[partition]) for partition in ready}
            self._bytes, self._since = 0, self._clock()
            self._writing = self._writer.submit(self._write_files, ready, dict(positions))

    def _write_files(self, ready: Mapping[int, _PendingRows], positions: Mapping[int, int]) -> dict[int, int]:
        done = {}
        for partition, pending in ready.items():
            rows = pa.concat_tables(pending.tables) if pending.tables else as_table(self._contents.source, 0, ())
            last = positions[partition] - 1
            self._folder.add(partition, pending.first, last, self._contents.view_rows(rows), pending.undecodable)
            done[partition] = last + 1
        return done

    def _await_write(self) -> None:
        """Wait for the file being written. Raises ExportError if it could not be written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._done = {**self._done, **writing.result()}


def _record_rows(rows: Sequence[ReceivedRecord]) -> RecordRows:
    """The rows of one Kafka record, which were decoded as one block or as single records."""
    first = rows[0]
    block = first.record if isinstance(first.record, Block) else Block.of([row.record for row in rows])
    return RecordRows.of_one(block, first.offset, first.timestamp)


def has_messages(client: ClientProperties, name: str) -> bool:
    """Whether the prompts of the experiences in topic `name` are messages: whether that of the first is.

    Raises ExportError if there is none.
    """
    first = next(read_rows(client, name, Experience), None)
    if first is None:
        raise ExportError(f"{name} has no experiences yet, so the form of its prompts is not known: export it later")
    return bool(first.trajectory.prompt.messages)


def with_recorded_form(
    contents: Contents, client: ClientProperties, folder: StorageFolder, *, keep_split: bool
) -> Contents:
    """`contents` with the form of its prompts, and unless `keep_split` the split, of the export in `folder`.

    If that is no export of the same topic and view, the topic's first prompt decides the form. Raises ExportError.
    """
    recorded = recorded_contents(folder, contents.topic, contents.view)
    if recorded is not None:
        split = contents.split if keep_split else recorded.split
        return replace(contents, split=split, messages=recorded.messages)
    if contents.view not in TEXT_VIEWS:
        return contents
    return replace(contents, messages=has_messages(client, contents.source.name(contents.run)))


@dataclass(frozen=True)
class StartPositions:
    """Returns, at every start, the offsets from which the export of `config` reads."""

    config: ExportConfig
    client: ClientProperties

    def __call__(self) -> Mapping[PartitionKey, int]:
        """By partition: the next offset to export. Raises ExportError if the topic does not have it."""
        contents, folder = read_contents(self.config.folder), self.config.folder
        name = contents.source.name(contents.run)
        held = partition_ranges(self.client, name)
        following = next_offsets(contents, read_parts(folder))
        if held.keys() != following.keys():
            raise ExportError(f"{folder} is an export of {len(following)} partitions, but {name} has {len(held)}")
        for partition, offset in following.items():
            if offset < held[partition].beginning:
                raise ExportError(
                    f"{name}, partition {partition}: offsets {offset} to {held[partition].beginning - 1} were deleted "
                    f"before they were exported to {folder}; export to another folder"
                )
            if offset > held[partition].end:
                raise ExportError(
                    f"{name}, partition {partition} ends at {held[partition].end}, but {folder} has it up to "
                    f"{offset}: the topic was deleted and created again, or this is another Kafka"
                )
        return {PartitionKey(contents.topic, partition): offset for partition, offset in following.items()}


MAX_POLLED = 256
"""Records in one fold."""


def export_stored(config: ExportConfig, client: ClientProperties) -> None:
    """Export all that the stopped log of `client` has of the topic of `config`. Raises ExportError.

    It is the same step over a broker's files, without Beam. There is no consumer group to commit to, so `laminar runs
    trim` does not wait for such an export.
    """
    topic = config.contents.source
    name = topic.name(config.contents.run)
    positions = dict(StartPositions(config, client)())
    exporting = ExportTopic(config).restore(Restored("", 0, (), {}, positions))
    try:
        for key, first in list(positions.items()):
            records = read_partition(client, name, key.partition, first, decoder=decode_as_blocks)
            while some := tuple(islice(records, MAX_POLLED)):
                positions[key] = some[-1].offset + 1
                exporting.fold(_polled(config, key, some, positions))
        ends = {
            PartitionKey(topic.short_name, number): held.end for number, held in partition_ranges(client, name).items()
        }
        exporting.fold(Polled("", 0, (), (), ends, caught_up=True, last=True))
    finally:
        exporting.close()


def _polled(
    config: ExportConfig, key: PartitionKey, records: tuple[StoredRecord, ...], positions: dict[PartitionKey, int]
) -> Polled:
    received, rejected = [], []
    for each in records:
        block: Block | None = None if each.error is not None else each.rows[0]
        if block is not None and block.kind in config.contents.source.record_classes:
            received.append(ReceivedRecord(key.topic, key.partition, each.offset, block, each.timestamp))
        else:
            why = each.error or f"a {block.kind.__name__ if block else 'record'} does not belong on {key.topic}"
            now = wall_ms()
            rejected.append(DeadLetter(f"read {key.topic}", why, key.topic, key.partition, each.offset, b"", now))
    return Polled("", 0, tuple(received), tuple(rejected), dict(positions), caught_up=False)
