"""The brokers of a simulated cluster: each leads some partitions and coordinates some transactions and groups.

One of them may be isolated from the others. Until ELECTION_S later nothing that it leads can be written, because its
followers do not respond; from then on others lead. A process that reaches it alone, or still takes it for the leader,
reads what it had at the beginning: a broker answers fetches until it learns of the new leader.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from infra.simulation.cluster import Place, SimulatedCluster
from infra.simulation.partition import PartitionLog

BROKERS = 3
ELECTION_S = 3.0
"""Seconds after which the others elect new leaders in place of an isolated broker."""
Led = Place | str
"""What a broker leads or coordinates: a partition, or a transactional id or group."""
Reach = Literal["others", "all", "isolated"]
"""The brokers that a process reaches during an isolation."""


@dataclass(frozen=True)
class BrokerIsolation:
    """Broker `broker` does not reach the others from `begin` to `end`; `reach` has the processes that reach it."""

    broker: int
    begin: float
    end: float
    reach: Mapping[str, Reach]
    had: Mapping[Place, PartitionLog]

    @property
    def elected_at(self) -> float:
        """When the others elect new leaders."""
        return self.begin + ELECTION_S


class SimulatedBrokers:
    """The brokers of `cluster`; `now` is the time in seconds."""

    def __init__(self, cluster: SimulatedCluster, now: Callable[[], float]) -> None:
        self._cluster, self._now = cluster, now
        self._isolation: BrokerIsolation | None = None

    @property
    def isolation(self) -> BrokerIsolation | None:
        """The present isolation."""
        if self._isolation is not None and self._now() >= self._isolation.end:
            self._isolation = None
        return self._isolation

    def isolate(self, broker: int, seconds: float, reach: Mapping[str, Reach]) -> None:
        """Isolate a broker, unless one is isolated."""
        if self.isolation is None:
            places = [place for place in self._cluster.places() if broker_of(place) == broker]
            had = {place: self._cluster.log(place).copy() for place in places}
            self._isolation = BrokerIsolation(broker, self._now(), self._now() + seconds, reach, had)

    def log(self, process: str, place: Place) -> PartitionLog:
        """What `process` reads of a partition."""
        isolation = self.isolation
        if isolation is not None and place in isolation.had and isolation.reach.get(process, "others") != "others":
            return isolation.had[place]
        return self._cluster.log(place)

    def answer(self, process: str, asked: Iterable[Led]) -> bool:
        """Whether the brokers of partitions, transactional ids and groups answer what `process` reads of them."""
        isolation = self.isolation
        if isolation is None:
            return True
        reach = isolation.reach.get(process, "others")
        if reach == "all":
            return True
        isolated = [broker_of(led) == isolation.broker for led in asked]
        return all(isolated) if reach == "isolated" else self._now() >= isolation.elected_at or not any(isolated)

    def written_in(self, process: str, led: Led) -> float | None:
        """Seconds until the leader or coordinator of `led` writes what `process` sends now; None if it never does."""
        isolation, now = self.isolation, self._now()
        if isolation is None:
            return 0.0
        reach, is_isolated = isolation.reach.get(process, "others"), broker_of(led) == isolation.broker
        if not is_isolated or (now >= isolation.elected_at and reach != "isolated"):
            return None if reach == "isolated" else 0.0
        return isolation.end - now if reach != "others" and isolation.end < isolation.elected_at else None

    def marked_in(self, led: Led) -> float:
        """Seconds until a coordinator writes the end of a transaction to the broker of `led`."""
        isolation = self.isolation
        if isolation is None or broker_of(led) != isolation.broker:
            return 0.0
        return max(0.0, min(isolation.end, isolation.elected_at) - self._now())


def broker_of(led: Led) -> int:
    """The broker that leads a partition, or coordinates a transactional id or group, unless it is isolated."""
    name = led if isinstance(led, str) else f"{led.topic}:{led.partition}"
    return zlib.crc32(name.encode()) % BROKERS
