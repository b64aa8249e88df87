"""Reads a topic from the broker's log files: every record with the outcome of its transaction.

It uses neither the product nor a Kafka client, so that a checker is independent of both. Format: Kafka's documentation,
"Record Batch" (magic 2, uncompressed) and "Control Batches".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Headers = tuple[tuple[str, bytes | None], ...]
Outcome = Literal["committed", "aborted", "open"]
_BATCH = struct.Struct(">qiibIhiqqqhii")
_TRANSACTIONAL, _CONTROL, _COMPRESSION = 0x10, 0x20, 0x07
_COMMIT = 1


@dataclass(frozen=True)
class LoggedRecord:
    """A record in the log, and the outcome of its transaction; committed if there was none."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    producer: tuple[int, int]
    """Producer id and epoch."""
    transaction: int
    """The offset of the marker that ended its transaction; its own offset without one; -1 while it is open."""
    outcome: Outcome


def read_topic(log_dir: Path, topic: str) -> list[LoggedRecord]:
    """Every data record of `topic` in a broker's `log.dirs`, by partition and offset."""
    folders = {
        int(path.name.removeprefix(f"{topic}-")): path for path in log_dir.glob(f"{topic}-*") if _is_of(path, topic)
    }
    return [record for partition in sorted(folders) for record in read_partition(folders[partition], partition)]


def read_partition(folder: Path, partition: int) -> list[LoggedRecord]:
    """Every data record in a partition's folder. Raises ValueError for a compressed batch."""
    found: list[LoggedRecord] = []
    open_since: dict[int, list[int]] = {}
    for segment in sorted(folder.glob("*.log")):
        for base, attributes, producer, body, count in _batches(segment.read_bytes()):
            if attributes & _CONTROL:
                (kind,) = struct.unpack_from(">h", next(_records(body, count))[1] or b"", 2)
                for index in open_since.pop(producer[0], []):
                    before = found[index]
                    outcome: Outcome = "committed" if kind == _COMMIT else "aborted"
                    found[index] = LoggedRecord(**{**vars(before), "transaction": base, "outcome": outcome})
                continue
            if attributes & _COMPRESSION:
                raise ValueError(f"{segment}: the batch at offset {base} is compressed")
            for delta, key, value, headers in _records(body, count):
                if attributes & _TRANSACTIONAL:
                    open_since.setdefault(producer[0], []).append(len(found))
                    outcome: tuple[int, Outcome] = (-1, "open")
                else:
                    outcome = (base + delta, "committed")
                found.append(LoggedRecord(partition, base + delta, key, value, headers, producer, *outcome))
    return found


def _is_of(path: Path, topic: str) -> bool:
    return path.is_dir() and path.name.removeprefix(f"{topic}-").isdigit()


def _batches(data: bytes) -> Iterator[tuple[int, int, tuple[int, int], bytes, int]]:
    """Base offset, attributes, (producer id, epoch), the records' bytes and their count."""
    at = 0
    while at + _BATCH.size <= len(data):
        base, length, _, magic, _, attributes, _, _, _, producer, epoch, _, count = _BATCH.unpack_from(data, at)
        if magic != 2 or at + 12 + length > len(data):
            return  # the tail is still being written
        yield base, attributes, (producer, epoch), data[at + _BATCH.size : at + 12 + length], count
        at += 12 + length


def _records(
    body: bytes, count: int
) -> Iterator[tuple[int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]]:
    """Offset delta, key, value and headers of each record in a batch."""
    at = 0
    for _ in range(count):
        length, at = _varint(body, at)
        end = at + length
        _, at = _varint(body, at + 1)  # attributes, timestamp delta
        delta, at = _varint(body, at)
        key, at = _bytes(body, at)
        value, at = _bytes(body, at)
        headers = []
        number, at = _varint(body, at)
        for _ in range(number):
            name, at = _bytes(body, at)
            content, at = _bytes(body, at)
            headers.append(((name or b"").decode(), content))
        yield delta, key, value, tuple(headers)
        at = end


def _bytes(data: bytes, at: int) -> tuple[bytes | None, int]:
    size, at = _varint(data, at)
    return (None, at) if size < 0 else (data[at : at + size], at + size)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A zigzag-coded integer of variable length."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return (value >> 1) ^ -(value & 1), at
