"""Verifies an export: every offset is in exactly one part, and every file matches its manifest and its offsets.

With access to the topic, each part is also made again from the log and must have the same rows, unless the log begins
later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

from infra.files import sha256_of
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import PartitionRange, partition_ranges
from infra.kafka.topic_reader import read_partition
from infra.storage import StorageFolder, list_folder, local_file
from operators.export.columns import RecordRows, as_table
from operators.export.config import Contents
from operators.export.folder import DATA, TEMPORARY, ExportPart, next_offsets, read_contents, read_parts
from operators.export.formats import read_table
from schemas.block_codec import decode_as_blocks

_KEYS = ("kafka_offset", "kafka_row", "conversation", "turn")
"""The columns that identify a row; the last two only in views with several rows for a trajectory."""


@dataclass
class Verification:
    """The verified export and the problems found in it."""

    folder: str
    files: int = 0
    rows: int = 0
    bytes: int = 0
    undecodable: int = 0
    offsets: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By partition: the first offset, and the offset after the last."""
    conditions: list[str] = field(default_factory=list)
    """What all rows satisfy: the conditions of the split, of the view and of the request."""
    compared: bool = False
    """Whether parts were compared with the log."""
    not_compared: dict[int, int] = field(default_factory=dict)
    """By partition: the offset after the last one that was not, since the log begins after the start of its part."""
    problems: list[str] = field(default_factory=list)


def check_manifests(root: StorageFolder) -> Verification:
    """Totals of the manifests of the export in `root`, and gaps or overlaps of their ranges. Raises ExportError."""
    contents = read_contents(root)
    parts = _published(root, read_parts(root))
    return Verification(
        folder=str(root),
        conditions=contents.conditions,
        files=sum(bool(part.file) for part in parts),
        rows=sum(part.rows for part in parts),
        bytes=sum(part.bytes for part in parts),
        undecodable=sum(len(part.undecodable) for part in parts),
        offsets={
            p: (contents.starts[p], end) for p, end in next_offsets(contents, parts).items() if p in contents.starts
        },
        problems=list(_range_problems(contents, parts)),
    )


def verify(root: StorageFolder, log: ExportedLog | None = None) -> Verification:
    """Check the manifests and every file of the export in `root`, and its rows against those in `log`.

    Raises ExportError if there is no export.
    """
    result, contents = check_manifests(root), read_contents(root)
    parts = _published(root, read_parts(root))
    for part in parts:
        where = part.file or f"partition {part.partition}, offsets {part.first} to {part.last}"
        result.problems += [f"{where}: {problem}" for problem in _part_problems(root, contents, part, log)]
    if log is not None:
        gone = [part for part in parts if log.offsets(contents, part.partition).beginning > part.first]
        result.not_compared = {part.partition: part.last + 1 for part in gone}
        result.compared = not parts or len(gone) < len(parts)
    known = {part.file for part in parts}
    for file in list_folder(root / DATA):
        if not file.name.startswith(TEMPORARY) and file.name not in known:
            result.problems.append(f"{file.name}: it has no manifest")
    return result


def _published(root: StorageFolder, parts: list[ExportPart]) -> list[ExportPart]:
    """`parts` without one whose writer was killed before it renamed the file: the next writer renames it."""
    return [p for p in parts if not p.file or not (root / DATA / (TEMPORARY + p.file)).exists()]


def _range_problems(contents: Contents, parts: list[ExportPart]) -> Iterator[str]:
    for partition, start in contents.starts.items():
        following = start
        for part in parts:
            if part.partition != partition:
                continue
            if part.first > following:
                yield f"partition {partition}: offsets {following} to {part.first - 1} are missing"
            elif part.first < following:
                yield f"partition {partition}: offsets {part.first} to {following - 1} are duplicated"
            following = max(following, part.last + 1)
    for part in parts:
        if part.partition not in contents.starts:
            yield f"{part.file}: the export has no partition {part.partition}"


def _part_problems(root: StorageFolder, contents: Contents, part: ExportPart, log: ExportedLog | None) -> Iterator[str]:
    rows = contents.schema.empty_table()
    if part.file:
        file = root / DATA / part.file
        if not file.exists():
            yield "the file is missing"
            return
        with local_file(file) as local:
            if local.stat().st_size != part.bytes or sha256_of(local) != part.sha256:
                yield "its bytes differ from its manifest"
                return
            rows = read_table(local, contents.format, contents.schema)
    if len(rows) != part.rows:
        yield f"it has {len(rows)} rows, not {part.rows}"
    keys = _keys(rows)
    if len(set(keys)) != len(keys):
        yield "some of its rows are duplicated"
    if any(not part.first <= key[0] <= part.last for key in keys):
        yield "it has rows of offsets outside its range"
    if rows["kafka_partition"].to_pylist() != [part.partition] * len(rows):
        yield "it has rows of another partition"
    if log is not None:
        yield from _log_problems(contents, part, keys, log)


def _log_problems(contents: Contents, part: ExportPart, keys: list[tuple[int, ...]], log: ExportedLog) -> Iterator[str]:
    """How the rows of a part, which have `keys`, differ from those of the log, unless it begins within the part."""
    held = log.offsets(contents, part.partition)
    if held.end <= part.last:
        yield f"the log ends at offset {held.end}: the topic was deleted and created again, or this is another Kafka"
    if held.end <= part.last or held.beginning > part.first:
        return
    full, undecodable = log.rows(contents, part)
    made_again = replace(contents, tokenizer="")  # keys need no texts
    expected = _keys(made_again.view_rows(contents.selected_rows(full)))
    if contents.view in ("preference", "verl") and part.replaces:  # they were made within each of the replaced files
        expected = keys
    if expected != keys:
        missing, extra = set(expected) - set(keys), set(keys) - set(expected)
        yield f"{len(missing)} rows of the log are missing from it, and {len(extra)} of its rows are not in the log"
    if undecodable != [offset for offset, _ in part.undecodable]:
        yield f"the log has {len(undecodable)} undecodable records in its range, not {len(part.undecodable)}"


def _keys(rows: pa.Table) -> list[tuple[int, ...]]:
    return list(zip(*(rows[name].to_pylist() for name in _KEYS if name in rows.schema.names), strict=True))


class ExportedLog:
    """The log at `client`, with which `verify` compares exports. Its methods raise UnknownTopic."""

    def __init__(self, client: ClientProperties) -> None:
        self._client = client
        self._ranges: dict[str, Mapping[int, PartitionRange]] = {}

    def offsets(self, contents: Contents, partition: int) -> PartitionRange:
        """The offsets that the log had when they were first read; none of a partition that does not exist."""
        name = contents.source.name(contents.run)
        if name not in self._ranges:
            self._ranges[name] = partition_ranges(self._client, name)
        return self._ranges[name].get(partition, PartitionRange(0, 0))

    def rows(self, contents: Contents, part: ExportPart) -> tuple[pa.Table, list[int]]:
        """The full rows of a part's offsets, all of which the log has, and the offsets of undecodable records."""
        topic = contents.source
        name = topic.name(contents.run)
        records = read_partition(self._client, name, part.partition, part.first, part.last + 1, decode_as_blocks)
        placed, undecodable = [], []
        for record in records:
            if record.error is not None or record.rows[0].kind not in topic.record_classes:
                undecodable.append(record.offset)
            else:
                placed.append(RecordRows.of_one(record.rows[0], record.offset, record.timestamp))
        return as_table(topic, part.partition, placed), undecodable
