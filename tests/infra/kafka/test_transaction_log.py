"""The coordinators' log of transactions is parsed as the broker writes it."""

from __future__ import annotations

import struct

import pytest

from infra.kafka.transaction_log import DamagedTransactionLog, LoggedProducer, TransactionRecord, parse_decision

PLACES = frozenset({("a", 0), ("a", 7), ("long-name", 300)})


def value(version: int, status: int) -> bytes:
    """A value of producer 4711 with PLACES, as Kafka's TransactionLogValue lays it out."""
    head = struct.pack(">hqhib", version, 4711, 3, 60_000, status)
    times = struct.pack(">qq", 1, 2)
    topics = [(b"a", [0, 7]), (b"long-name", [300])]
    if version == 0:
        body = struct.pack(">i", len(topics))
        for name, numbers in topics:
            body += struct.pack(">h", len(name)) + name + struct.pack(f">i{len(numbers)}i", len(numbers), *numbers)
        return head + body + times
    body = bytes([len(topics) + 1])
    for name, numbers in topics:
        body += bytes([len(name) + 1]) + name + bytes([len(numbers) + 1])
        body += struct.pack(f">{len(numbers)}i", *numbers) + bytes([1, 5, 2]) + b"xy"  # one tagged field of two bytes
    return head + body + times + bytes([0])


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize(("status", "committed"), [(2, True), (3, False)])
def test_parse_decision_reads_both_versions(version: int, status: int, committed: bool) -> None:
    assert parse_decision(value(version, status)) == TransactionRecord(4711, True, committed, PLACES)


@pytest.mark.parametrize(
    ("status", "under_way"), [(0, False), (1, True), (4, False), (5, False), (6, False), (7, True)]
)
def test_parse_decision_reads_states_without_decision(status: int, under_way: bool) -> None:
    assert parse_decision(value(1, status)) == TransactionRecord(4711, under_way, None, frozenset())


@pytest.mark.parametrize("version", [0, 1])
def test_parse_decision_rejects_truncated_values(version: int) -> None:
    whole = value(version, 2)
    for length in range(17, len(whole) - 22):  # what follows is not needed
        with pytest.raises(DamagedTransactionLog):
            parse_decision(whole[:length])


@pytest.mark.parametrize("damaged", [b"", b"\0", value(0, 2)[:17] + b"\x7f\xff\xff\xff", b"\0\x09" + value(0, 2)[2:]])
def test_parse_decision_rejects_damaged_values(damaged: bytes) -> None:
    with pytest.raises(DamagedTransactionLog):
        parse_decision(damaged)


def test_logged_producer_keeps_last_outcome_per_partition() -> None:
    producer, a, b = LoggedProducer(), ("a", 0), ("b", 0)
    producer.add(TransactionRecord(1, True, True, frozenset({a, b})))
    producer.add(TransactionRecord(1, True, False, frozenset({b})))
    assert (producer.committed, producer.under_way) == ({a: True, b: False}, True)
    producer.add(TransactionRecord(1, False, None, frozenset()))
    assert not producer.under_way
