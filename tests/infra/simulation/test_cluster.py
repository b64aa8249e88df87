"""What the comparison with Kafka leaves out: time-outs, deletion, unknown names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from infra.simulation.cluster import Place, SimulatedCluster
from infra.simulation.errors import (
    ConcurrentTransactions,
    InvalidProducerIdMapping,
    InvalidTransactionState,
    OffsetOutOfRange,
    ProducerFenced,
)
from infra.simulation.partition import ProducerKey

PLACE = Place("topic", 0)


@pytest.fixture
def cluster() -> SimulatedCluster:
    return SimulatedCluster({"topic": 1})


def test_expired_transaction_is_aborted_and_its_producer_fenced(cluster: SimulatedCluster) -> None:
    producer = cluster.init_producer_id("t", timeout_s=60)
    cluster.add_partitions("t", producer, [PLACE])
    cluster.produce(PLACE, [b"a"], producer, "t", 0)
    cluster.now = 59.0
    cluster.expire()
    assert cluster.log(PLACE).stable_end == 0
    cluster.now = 60.0
    cluster.expire()
    assert cluster.log(PLACE).stable_end == cluster.log(PLACE).end == 2
    assert cluster.log(PLACE).fetch(0, committed=True) == []
    with pytest.raises(ProducerFenced):
        cluster.end_transaction("t", producer, commit=True)


def test_transaction_has_ended_once_all_markers_are_written() -> None:
    cluster = SimulatedCluster({"topic": 2})
    places, writes = [Place("topic", 0), Place("topic", 1)], list[Callable[[], None]]()
    cluster.later = lambda owner, write: writes.append(write)
    producer = cluster.init_producer_id("t")
    cluster.add_partitions("t", producer, places)
    cluster.add_offsets("t", producer, "group")
    for place in places:
        cluster.produce(place, [b"a"], producer, "t", 0)
    cluster.commit_offsets("t", "group", producer, {places[0]: 7})
    cluster.end_transaction("t", producer, commit=True)

    def visible() -> list[int]:
        return [len(cluster.log(place).fetch(0, committed=True)) for place in places]

    def is_refused(*requests: Callable[[], object]) -> bool:
        for request in requests:
            with pytest.raises(ConcurrentTransactions):
                request()
        return cluster.open_transactions() == ["t"]

    seen = []
    for write in writes:
        seen.append((visible(), dict(cluster.committed_offsets("group"))))
        assert is_refused(
            lambda: cluster.init_producer_id("t"),
            lambda: cluster.add_partitions("t", producer, places),
            lambda: cluster.add_offsets("t", producer, "group"),
            lambda: cluster.end_transaction("t", producer, commit=True),
        )
        with pytest.raises(InvalidTransactionState):
            cluster.end_transaction("t", producer, commit=False)
        write()
    assert seen == [([0, 0], {}), ([1, 0], {}), ([1, 1], {})]
    assert cluster.committed_offsets("group") == {places[0]: 7}
    assert cluster.open_transactions() == []
    cluster.end_transaction("t", producer, commit=True)  # a repetition
    assert cluster.init_producer_id("t").epoch == producer.epoch + 1


def test_fenced_transaction_is_aborted_before_the_next_begins(cluster: SimulatedCluster) -> None:
    writes = list[Callable[[], None]]()
    cluster.later = lambda owner, write: writes.append(write)
    producer = cluster.init_producer_id("t")
    cluster.add_partitions("t", producer, [PLACE])
    cluster.produce(PLACE, [b"a"], producer, "t", 0)
    with pytest.raises(ConcurrentTransactions):
        cluster.init_producer_id("t")
    with pytest.raises(ProducerFenced):
        cluster.end_transaction("t", producer, commit=True)
    (write,) = writes
    write()
    assert cluster.init_producer_id("t").epoch == producer.epoch + 2
    assert cluster.log(PLACE).fetch(0, committed=True) == []


def test_deleted_records_are_out_of_range(cluster: SimulatedCluster) -> None:
    for value in (b"a", b"b", b"c"):
        cluster.send(PLACE, [value])
    log = cluster.log(PLACE)
    log.delete_before(2)
    assert log.fetch(2, committed=False) == [(2, b"c")]
    for offset in (1, 4):
        with pytest.raises(OffsetOutOfRange):
            log.fetch(offset, committed=False)
    with pytest.raises(OffsetOutOfRange):
        log.delete_before(4)


def test_compacted_log_keeps_the_newest_record_of_a_key(cluster: SimulatedCluster) -> None:
    for value in (b"a1", b"b1", b"a2"):
        cluster.send(PLACE, [value])
    aborted, opened = cluster.init_producer_id("t"), cluster.init_producer_id("u")
    for name, producer, value in (("t", aborted, b"a3"), ("u", opened, b"a4")):
        cluster.add_partitions(name, producer, [PLACE])
        cluster.produce(PLACE, [value], producer, name, 0)
    cluster.end_transaction("t", aborted, commit=False)
    log = cluster.log(PLACE)
    log.compact(lambda value: value[:1])
    assert log.fetch(0, committed=True) == [(1, b"b1"), (2, b"a2")]
    assert log.fetch(0, committed=False) == [(1, b"b1"), (2, b"a2"), (4, b"a4")]
    cluster.end_transaction("u", opened, commit=True)
    log.compact(lambda value: value[:1])
    assert log.fetch(0, committed=True) == [(1, b"b1"), (4, b"a4")]
    assert (log.begin, log.end) == (0, 7)


def test_unknown_producer_is_rejected(cluster: SimulatedCluster) -> None:
    with pytest.raises(InvalidProducerIdMapping):
        cluster.add_partitions("unknown", ProducerKey(7, 0), [PLACE])
