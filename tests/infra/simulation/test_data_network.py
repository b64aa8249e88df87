"""The network between simulated hosts delivers streams of bytes, late, damaged or not at all; and threads as fibers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from infra.simulation.data_network import DAMAGED_FROM, DataNetwork, LinkFault, LinkFaultKind, SimulatedSocket
from infra.simulation.process import SimulatedProcess
from infra.simulation.scheduler import EventScheduler
from infra.simulation.streams import Streams
from infra.simulation.system import SimulatedSystem


class Hosts:
    """Two processes on hosts a and b, which ended with `errors`."""

    def __init__(self, seed: int = 1) -> None:
        self.scheduler = EventScheduler()
        self.network = DataNetwork(self.scheduler, Streams(seed))
        self.errors: list[Exception | None] = []
        self.systems = [self.system(name) for name in ("a", "b")]

    def system(self, host: str) -> SimulatedSystem:
        process = SimulatedProcess(self.scheduler, host, self.errors.append)
        return SimulatedSystem(process, self.network, host, Streams(2).of(host))

    def run(self, *bodies: Callable[[SimulatedSystem], None], until: float = 60.0) -> None:
        """Run a body on each host."""
        for system, body in zip(self.systems, bodies, strict=True):
            system.start_thread("body", lambda system=system, body=body: body(system))
        self.scheduler.run(until=until)

    def disturb(self, kind: LinkFaultKind, begin: float = 0.0, end: float = 100.0) -> None:
        self.network.faults.append(LinkFault("b", begin, end, kind))


def receive(connection: SimulatedSocket, count: int) -> bytes:
    """`count` bytes, or fewer at the end of the stream."""
    memory, found = bytearray(count), 0
    while found < count and (some := connection.recv_into(memoryview(memory)[found:])):
        found += some
    return bytes(memory[:found])


def transfer(hosts: Hosts, data: bytes, timeout_s: float | None = None) -> tuple[list[bytes], list[float], list[str]]:
    """What b receives from a, when, and the errors of both."""
    received, times, errors = list[bytes](), list[float](), list[str]()

    def send(system: SimulatedSystem) -> None:
        try:
            with system.connect("b", 7001, 5.0) as connection:
                connection.sendall(data)
        except OSError as error:
            errors.append(f"a: {error}")

    def accept(system: SimulatedSystem) -> None:
        connection, _ = system.listen("b", 0, 4).accept()
        connection.settimeout(timeout_s)
        try:
            received.append(receive(connection, len(data) + 1))
            times.append(system.process.scheduler.now)
        except OSError as error:
            errors.append(f"b: {error}")

    hosts.run(send, accept)
    assert [error for error in hosts.errors if error is not None] == []
    return received, times, errors


DATA = bytes(range(256)) * 40


def test_connection_delivers_all_bytes_and_then_the_end() -> None:
    received, times, errors = transfer(Hosts(), DATA)
    assert (received, errors) == ([DATA], [])
    assert 0.1 < times[0] < 0.2  # 10 kB at 100 kB/s


def test_slow_link_takes_as_many_times_as_long() -> None:
    hosts = Hosts()
    hosts.disturb("slow")
    received, times, _ = transfer(hosts, DATA)
    assert received == [DATA]
    assert 2.0 < times[0] < 3.0


def test_damaged_link_changes_long_messages_alone() -> None:
    def arrives(seed: int, data: bytes) -> bytes:
        hosts = Hosts(seed)
        hosts.disturb("damaged")
        (received,) = transfer(hosts, data)[0]
        assert len(received) == len(data)
        return received

    assert {arrives(seed, DATA) == DATA for seed in range(12)} == {True, False}
    short = DATA[: DAMAGED_FROM - 1]
    assert {arrives(seed, short) for seed in range(12)} == {short}


def test_lossy_link_delivers_a_prefix_and_never_its_end() -> None:
    """A connection that breaks at a segment delivers none after it: there are no holes, and no early end."""
    segments = [bytes([number]) * 16 for number in range(40)]

    def arrived(seed: int) -> tuple[bytes, str]:
        hosts, received, ends = Hosts(seed), bytearray(), list[str]()
        hosts.disturb("lossy")

        def send(system: SimulatedSystem) -> None:
            with system.connect("b", 7001, 5.0) as connection:
                try:
                    for segment in segments:
                        connection.sendall(segment)
                        system.sleep(0.1)
                except ConnectionResetError:
                    return

        def accept(system: SimulatedSystem) -> None:
            connection, _ = system.listen("b", 0, 4).accept()
            try:
                while some := receive(connection, 16):
                    received.extend(some)
                ends.append("end")
            except ConnectionResetError:
                ends.append("reset")

        hosts.run(send, accept)
        (end,) = ends
        return bytes(received), end

    whole, found = b"".join(segments), [arrived(seed) for seed in range(30)]
    assert all(whole.startswith(received) for received, _ in found)
    assert {end: received == whole for received, end in found} == {"end": True, "reset": False}
    assert all(received == whole for received, end in found if end == "end")


def test_cut_link_delivers_after_it_heals() -> None:
    hosts = Hosts()
    hosts.disturb("cut", 0.05, 4.0)
    received, times, errors = transfer(hosts, DATA)
    assert (received, errors) == ([DATA], [])
    assert 4.0 <= times[0] < 6.0


def test_connection_to_a_cut_host_times_out() -> None:
    hosts = Hosts()
    hosts.disturb("cut")
    assert transfer(hosts, DATA)[2] == ["a: timed out"]


def test_silent_peer_times_out() -> None:
    hosts = Hosts()
    hosts.disturb("cut", 0.05, 10.0)
    assert transfer(hosts, DATA, timeout_s=3.0)[2] == ["b: timed out"]


def test_killed_process_ends_its_connections() -> None:
    hosts, found = Hosts(), list[Any]()

    def connect(system: SimulatedSystem) -> None:
        connection = system.connect("b", 7001, 5.0)
        found.append(connection.recv_into(memoryview(bytearray(4))))
        with pytest.raises(OSError, match="nobody listens"):
            system.connect("b", 7001, 5.0)
        found.append("refused")

    def accept(system: SimulatedSystem) -> None:
        system.listen("b", 0, 4).accept()
        system.sleep(1000)

    process = hosts.systems[1].process
    process.end = lambda end_fibers: (end_fibers(), hosts.network.end_process(process))[0]
    hosts.scheduler.at(2.0, process.kill)
    hosts.run(connect, accept)
    assert (found, hosts.errors) == ([0, "refused"], [])


def test_pool_runs_as_many_jobs_at_once_as_it_has_threads() -> None:
    hosts, ended = Hosts(), list[tuple[int, float]]()

    def work(system: SimulatedSystem) -> None:
        pool, now = system.pool(2, "jobs"), system.process.scheduler

        def job(number: int) -> int:
            system.sleep(1.0)
            ended.append((number, now.now))
            return number

        jobs: list[Future[int]] = [pool.submit(job, number) for number in range(4)]
        assert not pool.wait(jobs[3], 1.5)
        assert pool.wait(jobs[3], None)
        assert [each.result() for each in jobs] == [0, 1, 2, 3]

    hosts.run(work, lambda system: None)
    assert ended == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0)]


def test_condition_keeps_others_out_and_wakes_all_waiters() -> None:
    hosts, log = Hosts(), list[str]()
    system = hosts.systems[0]
    changed = system.condition()

    def wait(name: str) -> None:
        with changed:
            assert changed.wait_for(lambda: "open" in log, 10.0)
            with changed:  # re-entrant
                log.append(name)
                system.sleep(0.5)  # nobody else is inside meanwhile
                log.append(name)

    def notify(of: SimulatedSystem) -> None:
        of.sleep(1.0)
        with changed:
            log.append("open")
            changed.notify_all()
        with changed:
            assert not changed.wait(0.1)

    for name in ("x", "y"):
        system.start_thread(name, lambda name=name: wait(name))
    hosts.run(notify, lambda of: None)
    assert log == ["open", "x", "x", "y", "y"]
    assert hosts.errors == []
