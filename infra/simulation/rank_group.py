"""What simulated processes of one rendezvous share: the store of rank 0, and collectives, which fail as gloo's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from infra.simulation.process import SimulatedProcess
from infra.simulation.scheduler import Signal

T = TypeVar("T")
REQUEST_S = 0.002
"""How long a request to a store takes, or a collective."""
TIMEOUT_S = 10.0
"""Timeout of a request to a store, as of torch's."""
LOOK_S = 0.5
"""How often a process that waits in a collective looks whether the others still run."""
FIRST_PORT = 20_000


class RankStoreServer:
    """Values by key in the memory of `owner`, and the collectives of the processes that joined by them."""

    def __init__(self, owner: SimulatedProcess, token: str) -> None:
        self.owner, self.token = owner, token
        self.values: dict[str, bytes] = {}
        self.counters: dict[str, int] = {}
        self.collectives: Collectives[Any] = Collectives()


class RankStores:
    """All stores that processes have opened, by port."""

    def __init__(self) -> None:
        self._servers: dict[int, RankStoreServer] = {}

    def open(self, owner: SimulatedProcess, token: str, lost: type[Exception]) -> tuple[RankStoreClient, int]:
        """A store in `owner`, and its port; for `lost` see `RankStoreClient`."""
        port = FIRST_PORT + len(self._servers)
        server = self._servers[port] = RankStoreServer(owner, token)
        return RankStoreClient(server, owner, token, lost), port

    def connect(self, process: SimulatedProcess, port: int, token: str, lost: type[Exception]) -> RankStoreClient:
        """The store at `port`, for `process`. Raises OSError if nothing listens there."""
        process.sleep(REQUEST_S)
        server = self._servers.get(port)
        if server is None or not server.owner.alive:
            raise ConnectionRefusedError(f"nothing listens at port {port}")
        return RankStoreClient(server, process, token, lost)


class RankStoreClient:
    """The store of `server` as `process` uses it, with the methods of torch's.

    Requests raise `lost` once the server has ended, or if it does not answer in time."""

    def __init__(self, server: RankStoreServer, process: SimulatedProcess, token: str, lost: type[Exception]) -> None:
        self.server, self._process, self._lost = server, process, lost
        self._prefix = "" if token == server.token else f"{token}/"

    def set(self, key: str, value: str, /) -> None:
        """Set the value of `key`."""
        self._request(lambda: self.server.values.update({self._prefix + key: value.encode()}))

    def get(self, key: str, /) -> bytes:
        """The value of `key`, which must have one."""
        return self._request(lambda: self.server.values[self._prefix + key])

    def add(self, key: str, amount: int, /) -> int:
        """Add `amount` to a counter, and return it."""

        def add() -> int:
            name = self._prefix + key
            count = self.server.counters[name] = self.server.counters.get(name, 0) + amount
            return count

        return self._request(add)

    def check(self, keys: list[str], /) -> bool:
        """Whether all of `keys` have values."""
        present = self.server.values, self.server.counters
        return self._request(lambda: all(any(self._prefix + key in each for each in present) for key in keys))

    def _request(self, execute: Callable[[], T]) -> T:
        owner, scheduler = self.server.owner, self._process.scheduler
        self._process.sleep(REQUEST_S)
        deadline = scheduler.now + TIMEOUT_S
        while owner.alive and owner.paused_until > scheduler.now:
            if owner.paused_until > deadline:
                self._process.sleep(deadline - scheduler.now)
                raise self._lost("the store does not answer")
            self._process.sleep(owner.paused_until - scheduler.now)
        if not owner.alive:
            raise self._lost("the store's process has ended")
        return execute()


class Collectives(Generic[T]):
    """The collectives of one rendezvous. Each process has a rank, and calls them in the same order."""

    def __init__(self) -> None:
        self._members: dict[int, SimulatedProcess] = {}
        self._calls: dict[int, int] = {}
        self._rounds: dict[int, dict[int, T]] = {}
        self._changed = Signal()
        self._failed = False

    def gather(self, rank: int, count: int, process: SimulatedProcess, value: T, timeout_s: float) -> list[T]:
        """The values of all `count` ranks, in rank order. Raises RuntimeError if one ends first, or after a timeout."""
        scheduler = process.scheduler
        self._members[rank] = process
        number = self._calls[rank] = self._calls.get(rank, 0) + 1
        values = self._rounds.setdefault(number, {})
        values[rank] = value
        scheduler.notify(self._changed)
        deadline = scheduler.now + timeout_s
        while len(values) < count:
            if self._failed or not all(each.alive for each in self._members.values()):
                self._failed = True
                raise RuntimeError("gloo/simulated: connection closed by peer")
            if scheduler.now >= deadline:
                self._failed = True
                raise RuntimeError(f"gloo/simulated: timed out after {timeout_s:g} s")
            scheduler.wait([self._changed], min(LOOK_S, deadline - scheduler.now))
        self._rounds.pop(number - 2, None)  # every rank has left it: each has called the next one
        process.sleep(REQUEST_S)
        return [values[each] for each in range(count)]
