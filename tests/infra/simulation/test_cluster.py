"""What the comparison with Kafka leaves out: time-outs, deletion, unknown names."""

from __future__ import annotations

import pytest

from infra.simulation.cluster import Place, SimulatedCluster
from infra.simulation.errors import InvalidProducerIdMapping, OffsetOutOfRange, ProducerFenced
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
