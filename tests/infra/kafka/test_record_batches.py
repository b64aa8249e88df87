"""Record batches as columns: what kafka-python reads of the same bytes, and CorruptRecordError for any others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import CorruptRecordError
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from kafka.record.memory_records import MemoryRecords

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from infra.kafka.record_batches import RecordBatch, _WrappedBatches, unpack
from infra.kafka.topic_reader import read_batches

BYTES = st.one_of(st.none(), st.binary(max_size=300))
HEADERS = st.lists(st.tuples(st.text(max_size=200), st.binary(max_size=80)), max_size=3)
quick = settings(max_examples=40, deadline=None)
RECORDS = st.lists(st.tuples(st.integers(0, 2**40), BYTES, BYTES, HEADERS), min_size=1, max_size=20)


def built(records: list[Any], codec: int = 0) -> bytes:
    builder = DefaultRecordBatchBuilder(2, codec, False, -1, -1, -1, 1 << 20)
    for number, (timestamp, key, value, headers) in enumerate(records):
        builder.append(number, timestamp, key, value, headers)
    return bytes(builder.build())


def rows(batch: RecordBatch) -> list[Any]:
    return list(zip(batch.offsets, batch.timestamps, batch.keys, batch.values, batch.headers, strict=True))


def read(data: bytes, first: int = 0) -> list[Any]:
    batch = _WrappedBatches(MemoryRecords(data), 3, first).next_batch()
    (record,) = batch
    assert len(record.value) == 0 or record.offset >= record.value.offsets[-1]
    return rows(record.value)


@quick
@given(RECORDS, st.sampled_from([0, 1, 3, 4]))
def test_unpack_matches_kafka_python(records: list[Any], codec: int) -> None:
    data = built(records, codec)
    expected = [
        (each.offset, each.timestamp, each.key, each.value, tuple(each.headers)) for each in DefaultRecordBatch(data)
    ]
    assert read(data) == expected
    assert read(data, first=len(records) // 2) == expected[len(records) // 2 :]


@quick
@given(RECORDS, st.data())
def test_unpack_rejects_damaged_bytes(records: list[Any], draw: st.DataObject) -> None:
    data = bytearray(built(records)[61:])
    at = draw.draw(st.integers(0, len(data) - 1))
    data[at] ^= draw.draw(st.integers(1, 255))
    cut = draw.draw(st.integers(0, len(data)))
    for damaged in (bytes(data), bytes(data[:cut])):
        try:
            columns = unpack(damaged, len(records), 0, 0, {})
        except CorruptRecordError:
            continue
        assert {len(column) for column in columns} == {len(records)}  # the damage was inside a value


@pytest.mark.parametrize("count", [0, 2, 2**31 - 1, -1])
def test_unpack_rejects_wrong_count(count: int) -> None:
    with pytest.raises(CorruptRecordError):
        unpack(built([(0, b"k", b"v", [])])[61:], count, 0, 0, {})


def test_unpack_bounds_memory_of_distinct_headers() -> None:
    known: dict[bytes, Any] = {}
    for number in range(3000):
        unpack(built([(0, None, b"v", [("n", str(number).encode())])])[61:], 1, 0, 0, known)
    assert len(known) <= 1000


def test_record_batch_slices() -> None:
    batch = RecordBatch(0, [2, 5, 9], [0, 1, 2], [None] * 3, [b"a", b"b", b"c"], [()] * 3)
    assert batch.between(3, 9).values == [b"b"]
    assert batch.between(0, None) is batch
    assert rows(RecordBatch.concat([batch.slice(0, 1), batch.slice(1, 3)])) == rows(batch)


def test_poll_whole_batches_matches_consumer(broker: Broker, run_id: str) -> None:
    """Transactions of which one is aborted, all codecs, log-append time, and a start in the middle of a batch."""
    client, topic = ClientProperties.at(broker.bootstrap_servers), f"batches-{run_id}"
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(topic, 2, config={"message.timestamp.type": "LogAppendTime"})])
    for codec in (None, "gzip", "lz4", "zstd"):
        producer = KafkaProducer(
            bootstrap_servers=broker.bootstrap_servers,
            transactional_id=f"{topic}-{codec}",
            compression_type=codec,
            linger_ms=50,
        )
        producer.init_transactions()
        for kept in (True, False, True):
            producer.begin_transaction()
            for number in range(30):
                said = f"{codec}-{kept}-{number}".encode()
                producer.send(topic, said, key=said, headers=[("h", said)], partition=number % 2)
            producer.flush()
            producer.commit_transaction() if kept else producer.abort_transaction()
        producer.close()
    consumer = KafkaConsumer(
        bootstrap_servers=broker.bootstrap_servers, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    consumer.assign([TopicPartition(topic, number) for number in range(2)])
    expected: dict[int, list[Any]] = {0: [], 1: []}
    while sum(map(len, expected.values())) < 4 * 60:
        for where, records in consumer.poll(timeout_ms=500).items():
            expected[where.partition] += [
                (each.offset, each.timestamp, each.key, each.value, tuple(each.headers)) for each in records
            ]
    consumer.close()
    found: dict[int, list[Any]] = {0: [], 1: []}
    for batch in read_batches(client, topic):
        found[batch.partition] += rows(batch)
    assert found == expected
    some = read_batches(client, topic, start={0: 5, 1: 7}, until={0: 40, 1: 7})
    assert [row for batch in some for row in rows(batch)] == [row for row in expected[0] if 5 <= row[0] < 40]
