"""The connection of a process to the cluster: latency, and requests with faults.

A fault affects the requests of a process during a time. The request may be lost, its response may be lost, or it may
reach the cluster long after its sender has given it up. The sender sees the same in each case: a broken connection.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from infra.simulation.brokers import Led, SimulatedBrokers
from infra.simulation.errors import BrokerError, ConnectionLost, NotCoordinator
from infra.simulation.process import SimulatedProcess
from infra.simulation.scheduler import EventScheduler, Signal
from infra.simulation.streams import Streams

RequestFault = Literal["lost", "unanswered", "late", "slow", "repeated", "moved"]
REQUEST_FAULTS: tuple[RequestFault, ...] = ("lost", "unanswered", "late", "slow", "repeated")
"""`lost`: it never arrives. `unanswered`: it is executed, but its response is lost. `late`: its sender gives it up, and
it is executed later. `slow`: it takes long. `repeated`: it arrives twice, the second time late, if that is harmless.
Only of coordinators: `moved`, its broker is not the coordinator any more, and does not execute it."""
OF_COORDINATORS = ("InitProducerId", "AddPartitionsToTxn", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn")
ONLY: tuple[Mapping[str, RequestFault], ...] = (
    {"EndTxn": "late", "Produce": "slow"},
    {"EndTxn": "unanswered"},
    {"InitProducerId": "late"},
    {"AddPartitionsToTxn": "late"},
    {"Produce": "repeated"},
)
"""Faults of some requests alone: if all have faults, a transaction mostly fails at its first request."""
LATEST_S = 12.0
"""How late a request may be executed, at most."""
_Result = TypeVar("_Result")


@dataclass
class RequestFaults:
    """The faults of the requests of process `name` from `begin` to `end`; each has one with probability `share`."""

    name: str
    begin: float
    end: float
    kinds: tuple[RequestFault, ...]
    share: float
    draws: random.Random = field(repr=False)
    by_request: Mapping[str, RequestFault] = field(default_factory=dict)
    """The faults by kind of request: others have none. Empty: any request has any of `kinds`."""

    def affects(self, name: str, request: str, now: float) -> bool:
        """Whether a request of process `name` may have this fault now."""
        return (
            self.name == name and self.begin <= now < self.end and (not self.by_request or request in self.by_request)
        )

    def draw(self, request: str) -> RequestFault | None:
        """The fault of a request that may have one."""
        if self.draws.random() >= self.share:
            return None
        return self.by_request[request] if self.by_request else self.draws.choice(self.kinds)


class Network:
    """All connections of a simulation. Each process has its own streams of latencies, one for each kind of request."""

    def __init__(self, scheduler: EventScheduler, streams: Streams, brokers: SimulatedBrokers) -> None:
        self.scheduler, self.streams, self.brokers = scheduler, streams, brokers
        self.faults: list[RequestFaults] = []
        self.requests = 0
        """Requests sent so far."""
        self.trace: Callable[[str, str, str], None] | None = None
        """Called with process, request and fault of each request that has a fault."""

    def fault_of(self, name: str, request: str) -> RequestFault | None:
        """The fault of the next request of process `name`, which is of kind `request`."""
        for fault in self.faults:
            if fault.affects(name, request, self.scheduler.now) and (drawn := fault.draw(request)) is not None:
                return drawn
        return None

    def is_cut(self, name: str) -> bool:
        """Whether all requests of process `name` are lost now."""
        now = self.scheduler.now
        return any(
            f.name == name and f.begin <= now < f.end and f.share >= 1 and "lost" in f.kinds for f in self.faults
        )


class SimulatedConnection:
    """The connection of one process. `breaks` counts how often it broke."""

    def __init__(self, network: Network, process: SimulatedProcess) -> None:
        self.network, self.process = network, process
        self.breaks = 0

    def draws(self, request: str) -> random.Random:
        """The stream of the requests of a kind."""
        return self.network.streams.of(self.process.name, request)

    def latency(self, request: str) -> float:
        """Seconds for one way."""
        return 0.0005 + 0.004 * self.draws(request).random() ** 3

    def call(
        self,
        request: str,
        execute: Callable[[], _Result],
        *,
        writes: Led | None = None,
        reads: Iterable[Led] = (),
        idempotent: bool = False,
    ) -> _Result:
        """Send a request to the brokers of what it `writes` and `reads`, and wait for the response.

        Raises ConnectionLost, and the BrokerError of the response.
        """
        network, scheduler = self.network, self.network.scheduler
        network.requests += 1
        fault, held_s = network.fault_of(self.process.name, request), 0.0
        if (broker_fault := self._fault_of_brokers(writes, reads)) is not None:
            fault, held_s = broker_fault
        if fault == "repeated" and not idempotent:
            fault = "unanswered"
        if fault not in (None, "moved") and network.trace is not None:
            network.trace(self.process.name, request, fault)
        arrived, outcome, draws = Signal(), list[Any](), self.draws(request)

        def deliver(answered: bool) -> None:
            try:
                found: Any = execute() if fault != "moved" else NotCoordinator(request)
            except BrokerError as error:
                found = error
            if answered:
                outcome.append(found)
                scheduler.notify(arrived, self.latency(request))

        there = self.latency(request)
        if fault == "slow":
            there += 3.0 * draws.random()
        if fault in ("late", "repeated"):
            scheduler.after(there + held_s + LATEST_S * draws.random() ** 2, lambda: deliver(False))
        if fault in (None, "slow", "repeated", "moved"):
            scheduler.after(there, lambda: deliver(True))
            scheduler.wait([arrived])
            (found,) = outcome
            if isinstance(found, BrokerError):
                raise found
            return cast(_Result, found)
        if fault == "unanswered":
            scheduler.after(there, lambda: deliver(False))
        scheduler.sleep(there + 0.2 * draws.random())
        self.breaks += 1
        raise ConnectionLost(f"{request} of {self.process.name}: the connection broke")

    def _fault_of_brokers(self, writes: Led | None, reads: Iterable[Led]) -> tuple[RequestFault, float] | None:
        """The fault of a request whose broker is isolated, and the seconds until that broker executes it."""
        brokers, name = self.network.brokers, self.process.name
        if not brokers.answer(name, reads):
            return "lost", 0.0
        held_s = 0.0 if writes is None else brokers.written_in(name, writes)
        if held_s is None:
            return "lost", 0.0
        return ("late", held_s) if held_s else None
