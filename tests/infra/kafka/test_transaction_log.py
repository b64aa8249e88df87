"""The coordinators' log of transactions is parsed as the broker writes it."""

from __future__ import annotations

import struct

import pytest

from infra.kafka.transaction_log import DamagedTransactionLog, Outcome, parse_outcome, partition_of, transactional_id

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
def test_parse_outcome_reads_both_versions(version: int, status: int, committed: bool) -> None:
    assert parse_outcome(value(version, status)) == Outcome(4711, committed, PLACES)


@pytest.mark.parametrize("status", [0, 1, 4, 5, 6, 7])
def test_parse_outcome_ignores_states_without_decision(status: int) -> None:
    assert parse_outcome(value(1, status)) is None


@pytest.mark.parametrize("version", [0, 1])
def test_parse_outcome_rejects_truncated_values(version: int) -> None:
    whole = value(version, 2)
    for length in range(17, len(whole) - 22):  # what follows is not needed
        with pytest.raises(DamagedTransactionLog):
            parse_outcome(whole[:length])


@pytest.mark.parametrize("damaged", [b"", b"\0", value(0, 2)[:17] + b"\x7f\xff\xff\xff", b"\0\x09" + value(0, 2)[2:]])
def test_parse_outcome_rejects_damaged_values(damaged: bytes) -> None:
    with pytest.raises(DamagedTransactionLog):
        parse_outcome(damaged)


def test_partition_of_equals_java() -> None:
    """The expected numbers are `(id.hashCode() & 0x7fffffff) % 50`, printed by a Java program."""
    names = ("", "a", "hello", "laminar.run.score.0", "größe.0")
    assert [partition_of(name.encode(), 50) for name in names] == [0, 47, 22, 13, 39]


def test_transactional_id_is_read_from_keys_of_version_0() -> None:
    assert transactional_id(b"\0\0\0\x03abc") == b"abc"
    assert transactional_id(b"\0\1\0\x03abc") is None
    assert transactional_id(b"") is None
