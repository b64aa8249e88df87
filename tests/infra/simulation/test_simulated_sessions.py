"""A real session on a simulated cluster keeps its promises: fencing, notes, ledgers, unknown outcomes."""

from __future__ import annotations

import random

import pytest
from simulated_sessions import IN, IN_PLACE, World, open_session

from infra.kafka.log_gaps import LogTruncated
from infra.kafka.session import Fenced, Outgoing, Session, SessionLost
from infra.kafka.simulated_clients import SimulatedClients
from infra.kafka.simulated_producer import SimulatedRecord
from infra.kafka.transactions import TransactionTooSlow
from infra.simulation.network import OF_COORDINATORS, REQUEST_FAULTS, RequestFault, RequestFaults


def out(text: str) -> Outgoing:
    return Outgoing("out", 0, b"k", text.encode(), [])


def test_successor_continues_from_the_last_note() -> None:
    world, found = World(), list[tuple[int, object, list[bytes | None]]]()

    def first(clients: SimulatedClients) -> None:
        session = open_session(clients)
        session.commit([out("a")], {IN: 3}, {"out:0": 0}, {"n": 1})
        clients.sleep(100)

    def second(clients: SimulatedClients) -> None:
        session = open_session(clients)
        found.append((session.start, session.note.state, [each.value for each in session.ledger]))

    for _ in range(4):
        world.cluster.send(IN_PLACE, [SimulatedRecord(None, b"x", (), 0)])
    process = world.process("first", first)
    world.scheduler.run(until=5)
    process.kill()
    world.process("second", second)
    world.scheduler.run(until=10)
    assert (found, world.errors) == ([(2, {"n": 1}, [b"a"])], {"second": None})


def test_paused_predecessor_is_fenced_when_it_returns() -> None:
    world = World()

    def commits(clients: SimulatedClients) -> None:
        session = open_session(clients)
        for number in range(20):
            session.commit([out(f"{clients.connection.process.name}{number}")], {}, {}, {})
            clients.sleep(1)

    zombie = world.process("a", commits)
    world.scheduler.run(until=3.5)
    zombie.pause(4)
    world.process("b", commits)
    world.scheduler.run()
    assert isinstance(world.errors["a"], Fenced)
    assert world.values() == [b"a0", b"a1", b"a2", b"a3", *(b"b%d" % n for n in range(20))]


@pytest.mark.parametrize("replaced", [True, False])
def test_paused_process_reads_a_log_that_was_trimmed(replaced: bool) -> None:
    world = World()
    world.cluster.send(IN_PLACE, [SimulatedRecord(None, b"x", (), 0) for _ in range(4)])

    def reads(clients: SimulatedClients) -> None:
        session = open_session(clients)
        clients.sleep(5)
        session.poll(1.0)

    def successor(clients: SimulatedClients) -> None:
        open_session(clients).commit([], {IN: 4}, {"out:0": 0}, {})

    world.process("a", reads)
    world.scheduler.run(until=1)
    if replaced:
        world.process("b", successor)
    world.scheduler.run(until=3)
    world.cluster.log(IN_PLACE).delete_before(3)
    world.scheduler.run()
    assert isinstance(world.errors["a"], Fenced if replaced else LogTruncated)


def test_partition_that_fails_is_fetched_later() -> None:
    world, read = World(), list[tuple[float, int]]()
    world.cluster.send(IN_PLACE, [SimulatedRecord(None, b"x", (), 0)])

    def reads(clients: SimulatedClients) -> None:
        session = open_session(clients)
        world.network.faults = [RequestFaults("d", 0, world.scheduler.now + 0.1, ("slow",), 1.0, random.Random(1))]
        for _ in range(40):
            read.append((world.scheduler.now, len(session.poll(0.1))))

    world.process("d", reads)
    world.scheduler.run()
    assert world.errors == {"d": None}
    assert sum(count for _, count in read) == 1
    assert not read[0][1]


def test_too_slow_transaction_fails_as_with_kafka() -> None:
    """The source ends a role whose transactions are always too slow by the class of this error."""
    world, moved = World(), dict.fromkeys(OF_COORDINATORS, "moved")

    def commits(clients: SimulatedClients) -> None:
        session = open_session(clients)
        world.network.faults = [RequestFaults("a", 0, 60, (), 1.0, random.Random(1), moved)]
        session.commit([out("a")], {}, {}, {})

    world.process("a", commits)
    world.scheduler.run()
    lost = world.errors["a"]
    assert isinstance(lost, SessionLost)
    assert isinstance(lost.__cause__, TransactionTooSlow)


@pytest.mark.parametrize("fault", REQUEST_FAULTS)
def test_each_input_is_copied_once_despite_request_faults(fault: RequestFault) -> None:
    for seed in range(3):
        copy_despite(fault, seed)


def copy_despite(fault: RequestFault, seed: int) -> None:
    """Copy 40 records; processes lose sessions and are killed meanwhile."""
    world = World(seed)
    world.cluster.send(IN_PLACE, [SimulatedRecord(None, b"%d" % n, (), 0) for n in range(40)])
    world.network.faults = [RequestFaults("copier", 0, 60, (fault,), 0.08, random.Random(seed))]

    def copy(clients: SimulatedClients) -> None:
        session: Session | None = None
        while True:
            try:
                session = session or open_session(clients)
                records = session.poll(0.5)[:3]
                if not records:
                    continue
                session.seek({IN: records[-1].offset + 1})
                session.commit([out(each.value.decode()) for each in records], {IN: records[-1].offset + 1}, {}, {})
            except Fenced:
                return
            except SessionLost:
                session = None
                clients.sleep(0.3)

    draws = random.Random(seed)
    for _ in range(6):
        process = world.process("copier", copy)
        world.scheduler.run(until=world.scheduler.now + 8 * draws.random())
        if draws.random() < 0.5:
            process.kill()
        else:
            process.pause(6)
    world.process("copier", copy)
    world.scheduler.run(until=world.scheduler.now + 120)
    assert world.values() == [b"%d" % n for n in range(40)]
    world.scheduler.close()


def test_history_of_a_seed_is_the_same_every_time() -> None:
    def history() -> list[tuple[float, str, str, str]]:
        world, seen = World(7), list[tuple[float, str, str, str]]()
        world.network.faults = [RequestFaults("a", 0, 50, REQUEST_FAULTS, 0.3, random.Random(1))]
        world.network.trace = lambda *each: seen.append((world.scheduler.now, *each))

        def commits(clients: SimulatedClients) -> None:
            while True:
                try:
                    session = open_session(clients)
                    while True:
                        session.commit([out("a")], {}, {}, {})
                except SessionLost:
                    clients.sleep(0.1)

        world.process("a", commits)
        world.scheduler.run(until=50)
        world.scheduler.close()
        return seen

    first = history()
    assert len(first) > 50
    assert history() == first
