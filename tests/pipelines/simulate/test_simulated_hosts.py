"""A killed simulated process leaves its host's store as a killed process of the operating system leaves it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from infra.simulation.process import SimulatedProcess
from infra.simulation.scheduler import EventScheduler
from infra.simulation.streams import Streams
from infra.store.weight_store import WeightStore
from pipelines.simulate.configurations import RELAYS, configuration, wiring
from pipelines.simulate.explore import draw_history, play
from pipelines.simulate.hosts import SimulatedHosts
from pipelines.simulate.transferred_bytes import file_of
from pipelines.simulate.world import SimulatedHistory, World
from schemas.records import PolicyVersion

VERSION = PolicyVersion(1, 0)
BYTES = file_of(VERSION)


@pytest.fixture
def hosts() -> Iterator[SimulatedHosts]:
    made = SimulatedHosts(2, EventScheduler(), Streams(0))
    yield made
    made.close()


def writer(hosts: SimulatedHosts, seconds: float) -> SimulatedProcess:
    """A trainer that writes the version, and pauses before the seal."""
    scheduler = hosts.network.scheduler
    process = SimulatedProcess(scheduler, "trainer", lambda error: None)
    process.end = partial(hosts.end_process, process)

    def write() -> None:
        with hosts.open_store(process, 2).begin(VERSION, len(BYTES)) as arriving:
            arriving.view[:] = BYTES
            process.sleep(seconds)
            arriving.seal()

    process.start("write", write)
    return process


def test_killed_writer_leaves_its_partial_file_and_no_lock(hosts: SimulatedHosts) -> None:
    process = writer(hosts, 5.0)
    hosts.network.scheduler.run(until=1.0)
    process.kill()
    partial_file = hosts.root("host-0") / f"{VERSION}.partial"
    assert partial_file.read_bytes() == BYTES
    with WeightStore(hosts.root("host-0"), 2) as store:
        assert store.versions() == []
        with store.begin(VERSION, len(BYTES)) as arriving:  # it is the writer, and has removed the partial file
            arriving.view[:] = BYTES
            arriving.seal()
        assert store.versions() == [VERSION]


def test_invalid_and_missing_versions_are_named(hosts: SimulatedHosts) -> None:
    hosts.loaded[3] = None
    writer(hosts, 0.1)
    hosts.network.scheduler.run(until=1.0)
    assert hosts.invalid_versions() == []
    assert hosts.missing(VERSION) == ["host-1", "replica 3"]
    with WeightStore(hosts.root("host-1"), 2) as store, store.begin(VERSION, len(BYTES)) as arriving:
        arriving.view[:] = b"x" + BYTES[1:]
        arriving.seal()
    assert hosts.invalid_versions() == [f"version {VERSION} of host-1"]
    assert hosts.missing(VERSION) == ["replica 3"]


def test_processes_of_one_host_share_its_clock() -> None:
    clocks = []
    for seed in range(8):
        history = SimulatedHistory(seed, "relays", ())
        world = World(configuration("relays"), wiring("relays"), history, relays=RELAYS["relays"])
        assert world.hosts is not None
        by_host: dict[str | None, set[float]] = {}
        for name, role in world.roles.items():
            by_host.setdefault(world.hosts.host_of(name) or name, set()).add(role.skew_s)
        world.hosts.close()
        clocks.append(by_host)
    assert {len(skews) for by_host in clocks for skews in by_host.values()} == {1}
    assert any(len(set().union(*by_host.values())) == len(by_host) for by_host in clocks)  # a wrong clock a host


def test_history_passes_with_clocks_that_differ_by_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 10 minutes between any two hosts, with relays, and faults of them."""
    skews: dict[str, float] = {}

    def skew_s(_world: World, host: str) -> float:
        return skews.setdefault(host, 700.0 * (len(skews) % 2) + 100.0 * len(skews))

    monkeypatch.setattr(World, "skew_s", skew_s)
    history = play(draw_history(3, ["relays"]))
    assert history.failure is None
    assert max(skews.values()) - min(skews.values()) > 600.0


def test_lost_store_is_empty(hosts: SimulatedHosts) -> None:
    process = writer(hosts, 0.1)
    hosts.network.scheduler.run(until=1.0)
    assert hosts.missing(VERSION) == ["host-1"]
    process.kill()
    hosts.lose_store("host-0")
    assert hosts.missing(VERSION) == ["host-0", "host-1"]
