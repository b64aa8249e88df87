"""Settings of topics and committed offsets of groups, in the internal topics of a stopped broker.

The formats are Kafka's ConfigRecord (version 0) in `__cluster_metadata`, and OffsetCommitKey and OffsetCommitValue in
`__consumer_offsets`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from kafka.errors import CorruptRecordError
from kafka.protocol.schemas.fields.codecs import Int8, Int16, Int32, String, UnsignedVarInt32
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.memory_records import MemoryRecords

from infra.kafka.record_batches import read_batch

METADATA, OFFSETS = "__cluster_metadata", "__consumer_offsets"
_CONFIG_RECORD, _TOPIC_RESOURCE = 4, 2
_OFFSET_KEYS = (0, 1)
_VALUE = struct.Struct(">hq")
_TEXT = String()


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
            if (setting := _setting(BytesIO(value))) is not None:
                topic, name, text = setting
                if text is None:
                    found.get(topic, {}).pop(name, None)
                else:
                    found.setdefault(topic, {})[name] = text
    return found


def _setting(record: BytesIO) -> tuple[str, str, str | None] | None:
    """Topic, name and value of a setting, or None for another record."""
    _frame, kind, version = (UnsignedVarInt32.decode(record) for _ in range(3))
    if (kind, version) != (_CONFIG_RECORD, 0) or Int8.decode(record) != _TOPIC_RESOURCE:
        return None
    topic, name, value = (_TEXT.decode(record, compact=True) for _ in range(3))
    return topic or "", name or "", value


def committed_offset(key: bytes, value: bytes) -> tuple[str, str, int, int] | None:
    """Group, topic, partition and offset of a record of `__consumer_offsets`; None if it has no committed offset.

    Raises CorruptRecordError.
    """
    with _reported(OFFSETS):
        fields = BytesIO(key)
        if Int16.decode(fields) not in _OFFSET_KEYS:
            return None
        group, topic = _TEXT.decode(fields) or "", _TEXT.decode(fields) or ""
        return group, topic, Int32.decode(fields), _VALUE.unpack_from(value)[1]


def key_of_offset(key: bytes) -> tuple[str, str, int] | None:
    """Group, topic and partition of a key of `__consumer_offsets`; None if it is not of a committed offset."""
    found = committed_offset(key, bytes(_VALUE.size))
    return found and found[:3]


@contextmanager
def _reported(topic: str) -> Iterator[None]:
    try:
        yield
    except (struct.error, ValueError) as error:
        raise CorruptRecordError(f"a record of {topic} cannot be parsed: {error}") from error
