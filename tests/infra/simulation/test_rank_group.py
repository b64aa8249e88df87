"""The store and the collectives of simulated ranks fail as torch's do."""

from __future__ import annotations

import pytest

from infra.simulation.process import SimulatedProcess
from infra.simulation.rank_group import TIMEOUT_S, Collectives, RankStoreClient, RankStores
from infra.simulation.scheduler import EventScheduler


class Lost(RuntimeError):
    """The server has ended."""


class Ranks:
    """Two processes, with what each of them has found."""

    def __init__(self) -> None:
        self.scheduler, self.stores = EventScheduler(), RankStores()
        self.processes = [SimulatedProcess(self.scheduler, f"rank {n}", lambda error: None) for n in range(2)]
        self.server, self.port = self.stores.open(self.processes[0], "a token", Lost)
        self.collectives: Collectives[int] = Collectives()
        self.found: dict[int, object] = {}

    def client(self, token: str = "a token") -> RankStoreClient:
        return self.stores.connect(self.processes[1], self.port, token, Lost)

    def gather(self, rank: int, *values: int, timeout_s: float = 60.0) -> None:
        def call() -> None:
            try:
                self.found[rank] = [
                    self.collectives.gather(rank, 2, self.processes[rank], value, timeout_s) for value in values
                ]
            except RuntimeError as error:
                self.found[rank] = str(error)

        self.processes[rank].start("gather", call, vital=False)

    def run(self, call: object = None) -> None:
        if callable(call):
            self.processes[1].start("call", call, vital=False)
        self.scheduler.run(until=100.0)


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_collectives_return_the_values_in_rank_order(ranks: Ranks) -> None:
    ranks.gather(1, 10, 11, 12)
    ranks.gather(0, 0, 1, 2)
    ranks.run()
    assert ranks.found == {0: [[0, 10], [1, 11], [2, 12]], 1: [[0, 10], [1, 11], [2, 12]]}


def test_collective_fails_once_another_rank_has_ended(ranks: Ranks) -> None:
    ranks.gather(0, 1, 2)
    ranks.gather(1, 1)
    ranks.scheduler.after(1.0, ranks.processes[1].kill)
    ranks.run()
    assert ranks.found[0] == "gloo/simulated: connection closed by peer"


def test_collective_fails_after_its_timeout_for_the_late_too(ranks: Ranks) -> None:
    ranks.gather(0, 1, timeout_s=3.0)
    ranks.scheduler.after(10.0, lambda: ranks.gather(1, 1, 2))
    ranks.run()
    assert ranks.found[0] == "gloo/simulated: timed out after 3 s"
    assert ranks.found[1] == "gloo/simulated: connection closed by peer"


def test_store_has_values_and_counters_by_token(ranks: Ranks) -> None:
    found: list[object] = []

    def call() -> None:
        one, other = ranks.client(), ranks.client("another token")
        one.set("key", "value")
        found.extend([one.get("key"), one.add("count", 2), one.add("count", 0), one.check(["key", "count"])])
        found.append(other.check(["key"]))

    ranks.run(call)
    assert found == [b"value", 2, 2, True, False]


def test_requests_fail_once_the_server_has_ended(ranks: Ranks) -> None:
    def call() -> None:
        client = ranks.client()
        ranks.processes[0].kill()
        with pytest.raises(Lost, match="has ended"):
            client.add("count", 1)
        with pytest.raises(ConnectionRefusedError, match=f"nothing listens at port {ranks.port}"):
            ranks.client()
        ranks.found[1] = "both failed"

    ranks.run(call)
    assert ranks.found[1] == "both failed"


@pytest.mark.parametrize("paused_s", [TIMEOUT_S / 2, 2 * TIMEOUT_S])
def test_request_waits_for_a_paused_server_until_its_timeout(ranks: Ranks, paused_s: float) -> None:
    def call() -> None:
        client = ranks.client()
        ranks.processes[0].pause(paused_s)
        try:
            ranks.found[1] = client.add("count", 1)
        except Lost as error:
            ranks.found[1] = str(error)

    ranks.run(call)
    assert ranks.found[1] == (1 if paused_s < TIMEOUT_S else "the store does not answer")
