"""A broker that is cut off from the others: who still writes, who reads what, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_sessions import IN, IN_PLACE, OUT_PLACE, RESTORE, World, open_session

from infra.kafka.log_gaps import LogTruncated
from infra.kafka.session import Outgoing, Session, SessionLost
from infra.kafka.simulated_clients import SimulatedClients
from infra.kafka.simulated_producer import SimulatedRecord
from infra.simulation.brokers import ELECTION_S, SimulatedBrokers, broker_of
from infra.simulation.cluster import Place, SimulatedCluster

RESTORE_PLACE = Place(*RESTORE)


def record(text: str) -> SimulatedRecord:
    return SimulatedRecord(None, text.encode(), (), 0)


def out(text: str) -> Outgoing:
    return Outgoing("out", 0, b"k", text.encode(), [])


@pytest.fixture
def clock() -> list[float]:
    return [10.0]


@pytest.fixture
def cluster() -> SimulatedCluster:
    return SimulatedCluster({"in": 1, "out": 1, "restore": 1})


@pytest.fixture
def brokers(cluster: SimulatedCluster, clock: list[float]) -> SimulatedBrokers:
    """The broker of `in` and `out` is isolated for 20 s; process both reaches all brokers, process alone only it."""
    cluster.send(IN_PLACE, [record("before")])
    brokers = SimulatedBrokers(cluster, lambda: clock[0])
    brokers.isolate(broker_of(IN_PLACE), 20.0, {"both": "all", "alone": "isolated"})
    cluster.send(IN_PLACE, [record("after")])
    return brokers


def test_partitions_have_several_brokers() -> None:
    assert len({broker_of(Place("trajectories", number)) for number in range(20)}) == 3
    assert broker_of(IN_PLACE) != broker_of(RESTORE_PLACE)


@pytest.mark.parametrize("process", ["both", "alone"])
def test_isolated_broker_shows_what_it_had(brokers: SimulatedBrokers, clock: list[float], process: str) -> None:
    assert [each.value for _, each in brokers.log(process, IN_PLACE).fetch(0, committed=True)] == [b"before"]
    assert [each.value for _, each in brokers.log("other", IN_PLACE).fetch(0, committed=True)] == [b"before", b"after"]
    assert brokers.answer(process, [IN_PLACE])
    assert not brokers.answer("other", [IN_PLACE])
    clock[0] += ELECTION_S
    assert brokers.answer("other", [IN_PLACE])
    assert brokers.answer("both", [IN_PLACE, RESTORE_PLACE])
    assert not brokers.answer("alone", [IN_PLACE, RESTORE_PLACE])
    clock[0] += 20.0
    assert brokers.log(process, IN_PLACE).end == 2


def test_isolated_broker_keeps_records_that_others_compact(
    brokers: SimulatedBrokers, cluster: SimulatedCluster
) -> None:
    cluster.log(IN_PLACE).compact(lambda message: message.key)
    assert [each.value for _, each in brokers.log("both", IN_PLACE).fetch(0, committed=True)] == [b"before"]
    assert [each.value for _, each in cluster.log(IN_PLACE).fetch(0, committed=True)] == [b"after"]


def test_writes_wait_for_the_election(brokers: SimulatedBrokers, clock: list[float]) -> None:
    assert [brokers.written_in(each, IN_PLACE) for each in ("other", "both", "alone")] == [None] * 3
    assert [brokers.written_in(each, RESTORE_PLACE) for each in ("other", "both", "alone")] == [0.0, 0.0, None]
    assert (brokers.marked_in(IN_PLACE), brokers.marked_in(RESTORE_PLACE)) == (ELECTION_S, 0.0)
    clock[0] += ELECTION_S
    assert [brokers.written_in(each, IN_PLACE) for each in ("other", "both", "alone")] == [0.0, 0.0, None]
    assert brokers.marked_in(IN_PLACE) == 0.0


def test_broker_that_returns_before_the_election_writes_late(cluster: SimulatedCluster) -> None:
    brokers = SimulatedBrokers(cluster, lambda: 0.0)
    brokers.isolate(broker_of(IN_PLACE), 1.0, {"both": "all"})
    assert (brokers.written_in("both", IN_PLACE), brokers.written_in("other", IN_PLACE)) == (1.0, None)
    brokers.isolate(broker_of(RESTORE_PLACE), 5.0, {})  # one at a time
    assert brokers.written_in("both", RESTORE_PLACE) == 0.0


def opened_beside(isolated: Place, commit: Any) -> list[Session | Exception]:
    """A first process commits, the broker of `isolated` is cut off, and then it commits again with `commit`. What a
    start finds that still reads from that broker, each second until one succeeds.
    """
    world, found = World(), list[Session | Exception]()

    def first(clients: SimulatedClients) -> None:
        session = open_session(clients)
        session.commit([out("a")], {IN: 0}, {"out:0": 0}, {"n": 1})
        clients.sleep(ELECTION_S + 1)
        commit(session)
        clients.sleep(100)

    def second(clients: SimulatedClients) -> None:
        while not found or isinstance(found[-1], Exception):
            try:
                found.append(open_session(clients))
            except SessionLost as error:
                found.append(error)
                clients.sleep(1)

    process = world.process("first", first)
    world.scheduler.run(until=1)
    world.network.brokers.isolate(broker_of(isolated), 12.0, {"second": "all"})
    world.scheduler.run(until=6)
    process.kill()
    world.process("second", second)
    world.scheduler.run(until=100)
    return found


def test_start_does_not_continue_from_an_older_note() -> None:
    *lost, session = opened_beside(RESTORE_PLACE, lambda session: session.commit([], {IN: 0}, {"out:0": 0}, {"n": 2}))
    assert isinstance(session, Session)
    assert (session.start, session.note.state) == (2, {"n": 2})
    assert lost
    assert all("cut off from the others and no longer leads it" in str(each) for each in lost)


def test_start_reads_its_last_outputs_back() -> None:
    *_, session = opened_beside(
        OUT_PLACE, lambda session: session.commit([out("b")], {IN: 0}, {"out:0": 0}, {"n": 1}, note_due=False)
    )
    assert isinstance(session, Session)
    assert [each.value for each in session.ledger] == [b"a", b"b"]


def test_position_beyond_a_broker_that_leads_no_longer_is_no_gap() -> None:
    """A process has read on from the new leader; then it takes the isolated broker for the leader."""
    world = World()

    def reads(clients: SimulatedClients) -> None:
        session = open_session(clients)
        clients.sleep(1)
        world.cluster.send(IN_PLACE, [record("a")])
        assert len(session.poll(1.0)) == 1
        world.network.brokers.isolate(broker_of(IN_PLACE), 5.0, {"reads": "all"})
        world.network.brokers.isolation.had[IN_PLACE].end = 0  # type: ignore[union-attr]
        session.poll(1.0)

    world.process("reads", reads)
    world.scheduler.run()
    lost = world.errors["reads"]
    assert isinstance(lost, SessionLost)
    assert "does not lead a partition any more" in str(lost)
    assert not isinstance(lost, LogTruncated)
