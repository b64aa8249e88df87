"""Settings of topics and committed offsets of groups, in the internal topics of a stopped broker.

The formats are Kafka's ConfigRecord (version 0) in `__cluster_metadata`, and OffsetCommitKey and OffsetCommitValue in
`__consumer_offsets`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kafka.errors import CorruptRecordError
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.memory_records import MemoryRecords

from infra.kafka.record_batches import read_batch

METADATA, OFFSETS = "__cluster_metadata", "__consumer_offsets"
_CONFIG_RECORD, _TOPIC_RESOURCE = 4, 2
_OFFSET_KEYS = (0, 1)
_KEY, _LENGTH, _PARTITION, _VALUE = struct.Struct(">h"), struct.Struct(">h"), struct.Struct(">i"), struct.Struct(">hq")


def snapshot_values(folder: Path) -> Iterator[bytes]:
    """The records of the newest snapshot of the metadata in `folder`; none if there is no snapshot."""
    newest = max(folder.glob("*-*.checkpoint"), default=None)
    if newest is None:
        return
    records = MemoryRecords(newest.read_bytes())
    while (batch := records.next_batch()) is not None:
        if isinstance(batch, DefaultRecordBatch) and not batch.is_control_batch:
            yield from (value for value in read_batch(batch, 0, 0).values if value is not None)


def topic_settings(values: Iterable[bytes]) -> dict[str, dict[str, str]]:
    """The settings of each topic that differ from the broker's, from the records of the metadata, in their order.

    Raises CorruptRecordError.
    """
    found: dict[str, dict[str, str]] = {}
    for value in values:
        with _reported(METADATA):
            if (setting := _setting(_Fields(value))) is not None:
                topic, name, text = setting
                if text is None:
                    found.get(topic, {}).pop(name, None)
                else:
                    found.setdefault(topic, {})[name] = text
    return found


def _setting(fields: _Fields) -> tuple[str, str, str | None] | None:
    """Topic, name and value of a setting, or None for another record."""
    _frame, kind, version = fields.number(), fields.number(), fields.number()
    if (kind, version) != (_CONFIG_RECORD, 0) or fields.byte() != _TOPIC_RESOURCE:
        return None
    return fields.text() or "", fields.text() or "", fields.text()


def committed_offset(key: bytes, value: bytes) -> tuple[str, str, int, int] | None:
    """Group, topic, partition and offset of a record of `__consumer_offsets`; None if it has no committed offset.

    Raises CorruptRecordError.
    """
    with _reported(OFFSETS):
        (version,) = _KEY.unpack_from(key)
        if version not in _OFFSET_KEYS:
            return None
        group, at = _short_text(key, _KEY.size)
        topic, at = _short_text(key, at)
        return group, topic, _PARTITION.unpack_from(key, at)[0], _VALUE.unpack_from(value)[1]


def key_of_offset(key: bytes) -> tuple[str, str, int] | None:
    """Group, topic and partition of a key of `__consumer_offsets`; None if it is not of a committed offset."""
    found = committed_offset(key, bytes(_VALUE.size))
    return found and found[:3]


@contextmanager
def _reported(topic: str) -> Iterator[None]:
    try:
        yield
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise CorruptRecordError(f"a record of {topic} cannot be parsed: {error}") from error


def _short_text(data: bytes, at: int) -> tuple[str, int]:
    (length,) = _LENGTH.unpack_from(data, at)
    begin = at + _LENGTH.size
    return data[begin : begin + length].decode(), begin + length


class _Fields:
    """Reads the fields of a record in Kafka's flexible encoding."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def number(self) -> int:
        """An unsigned varint."""
        found = shift = 0
        while True:
            byte = self.byte()
            found |= (byte & 127) << shift
            if byte < 128:
                return found
            shift += 7

    def text(self) -> str | None:
        """A compact string: its length plus one, 0 for null."""
        length = self.number() - 1
        if length < 0:
            return None
        self._at += length
        return self._data[self._at - length : self._at].decode()
