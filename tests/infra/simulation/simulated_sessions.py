"""Real sessions on a simulated cluster: processes that commit, die, pause and lose requests."""

from __future__ import annotations

from collections.abc import Callable

from infra.kafka.properties import ClientProperties
from infra.kafka.session import Session
from infra.kafka.session_config import Input, Partition, SessionConfig
from infra.kafka.simulated_clients import SimulatedClients
from infra.kafka.simulated_consumer import CommitSignals
from infra.simulation.brokers import SimulatedBrokers
from infra.simulation.cluster import Place, SimulatedCluster
from infra.simulation.network import Network, SimulatedConnection
from infra.simulation.process import SimulatedProcess
from infra.simulation.scheduler import EventScheduler
from infra.simulation.streams import Streams

OUT, RESTORE, IN = Partition("out", 0), Partition("restore", 0), Partition("in", 0)
OUT_PLACE, IN_PLACE = Place(*OUT), Place(*IN)


class World:
    """A cluster with the topics in, out and restore, and processes on it."""

    def __init__(self, seed: int = 0) -> None:
        self.scheduler = EventScheduler()
        self.cluster = SimulatedCluster({"in": 1, "out": 1, "restore": 1})
        self.network = Network(
            self.scheduler, Streams(seed), SimulatedBrokers(self.cluster, lambda: self.scheduler.now)
        )
        self.signals = CommitSignals(self.cluster, self.scheduler)
        self.errors: dict[str, Exception | None] = {}

    def clients(self, process: SimulatedProcess) -> SimulatedClients:
        return SimulatedClients(self.cluster, SimulatedConnection(self.network, process), self.signals)

    def process(self, name: str, body: Callable[[SimulatedClients], None]) -> SimulatedProcess:
        """Start a process with `body`; `errors` has how it ended."""

        def ended(error: Exception | None) -> None:
            self.errors[name] = error

        process = SimulatedProcess(self.scheduler, name, ended)
        process.start("main", lambda: body(self.clients(process)))
        return process

    def values(self, committed: bool = True) -> list[bytes]:
        """The values in `out`."""
        return [message.value for _, message in self.cluster.log(OUT_PLACE).fetch(0, committed=committed)]


def config(group: str = "copier", timeout_s: float = 10.0) -> SessionConfig:
    client = ClientProperties.at("localhost:1")
    return SessionConfig(
        client, group, (Input(IN.topic, (0,)),), RESTORE, ledger=(OUT,), owned=(OUT,), transaction_timeout_s=timeout_s
    )


def open_session(clients: SimulatedClients, group: str = "copier") -> Session:
    return Session(config(group), clients)
