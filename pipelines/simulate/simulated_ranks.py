"""The real trainer in simulated processes: its ranks, their rendezvous and collectives, checkpoints and weights.

It imports torch, so it is imported only for runs that train so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from infra.kafka.properties import ClientProperties
from infra.kafka.role_notes import ReadNotes, notes_reader
from infra.kafka.simulated_clients import SimulatedClients
from infra.kafka.simulated_inspection import InspectionClients
from infra.simulation.process import SimulatedProcess
from infra.simulation.rank_group import Collectives, RankStoreClient
from infra.simulation.system import SimulatedPool, SimulatedSystem
from infra.store.weight_store import WeightStore
from operators.io.elements import Restored, ShardFold
from operators.io.fold_records import FoldStep
from operators.trainer.config import LearnerConfig
from operators.trainer.learner_contract import LearnerContract
from operators.trainer.rank_addresses import AddressTopic
from operators.trainer.rank_services import RankServices, RankStore
from operators.trainer.ranks import Ranks
from operators.trainer.train_batches import TrainBatches
from operators.trainer.train_follower import TrainFollower
from pipelines.simulate.hosts import SimulatedHosts
from pipelines.simulate.simulated_learner import SimulatedLearner
from pipelines.simulate.transferred_bytes import tensors_of
from schemas.records import PolicyVersion, RankAddress

T = TypeVar("T")
JOB_S = 4.0
"""The longest pause before and after a job of a thread, and a read or write of checkpoints: a process may die then.
Few are long."""
READ_S = 0.1
"""How long a rank waits for a new address of rank 0."""
STOP_POLL_S = 0.1


def restore_rank(
    step: FoldStep,
    restored: Restored,
    process: SimulatedProcess,
    clients: SimulatedClients,
    hosts: SimulatedHosts,
    violated: Callable[[str], None],
) -> ShardFold:
    """The fold of a rank's start, in `process`; `violated` is called with wrong weights. Raises TypeError for a step
    that is no rank's."""
    if not isinstance(step, TrainBatches | TrainFollower):
        raise TypeError(f"{type(step).__name__} cannot be simulated")
    return step.restore(restored, SimulatedRankServices(step, process, clients, hosts, violated))


@dataclass(frozen=True, slots=True)
class SimulatedRanks(Ranks):
    """Ranks whose collectives are those of simulated processes."""

    process: SimulatedProcess | None = None
    collectives: Collectives[Tensor] | None = None

    def gather(self, values: Tensor) -> list[Tensor]:
        """See `Ranks.gather`."""
        assert self.process is not None
        assert self.collectives is not None
        return self.collectives.gather(self.rank, self.count, self.process, values.clone(), self.timeout_s)


class SimulatedRankServices(RankServices):
    """The services of one start of a rank."""

    def __init__(
        self,
        step: TrainBatches | TrainFollower,
        process: SimulatedProcess,
        clients: SimulatedClients,
        hosts: SimulatedHosts,
        violated: Callable[[str], None],
    ) -> None:
        system = hosts.system(process)
        self.system = self._slow = _SlowSystem(system)
        self.stopping = _Stopping(process)
        self.host = system.host
        self._step, self._process, self._clients = step, process, clients
        self._hosts, self._violated = hosts, violated

    def unix_ms(self) -> int:
        """See `RankServices`, as all others."""
        return self._process.unix_ms()

    def thread_seconds(self) -> float:
        return 0.0

    def process_seconds(self) -> float:
        return 0.0

    def persist(self, action: Callable[[], T], tries: int) -> T:
        self._slow.pause()
        result = super().persist(action, tries)
        self._slow.pause()
        return result

    def weight_store(self, folder: Path, keep: int) -> WeightStore:
        return self._hosts.open_store(self._process, keep)

    def producer(self, client: ClientProperties) -> Any:
        return self._clients.plain_producer()

    def addresses(self, client: ClientProperties, run: str) -> AddressTopic:
        process = self._process
        found = InspectionClients(self._clients.cluster, process.sleep, process.unix_ms, READ_S)
        return AddressTopic(ClientProperties.of_clients(found), run, self.role_notes(client, run))

    def role_notes(self, client: ClientProperties, run: str) -> ReadNotes:
        return notes_reader(run, self._clients.observer)

    def open_learner(self, config: LearnerConfig, model: Path, device: str, ranks: Ranks) -> LearnerContract:
        return SimulatedLearner(self._step.config.emulation, self._process, ranks)

    def write_model(
        self,
        model: PreTrainedModel,
        source: Path,
        specs: Mapping[str, Tensor],
        tensors: Iterable[tuple[str, Tensor]],
        folder: Path,
    ) -> None:
        final = tensors_of(self._hosts.content_of(PolicyVersion(0, self._step.config.optimizer_steps)))
        for name, tensor in tensors:
            if tensor.numpy().tobytes() != final[name].tobytes():
                self._violated(f"tensor {name} of the final model is not a function of the batches")
        self._slow.pause()
        folder.mkdir()

    def open_store(self, host: str, token: str) -> tuple[RankStore, int]:
        return self._hosts.rank_stores.open(self._process, token, dist.DistNetworkError)

    def connect(self, address: RankAddress) -> RankStore:
        lost = dist.DistNetworkError
        return self._hosts.rank_stores.connect(self._process, address.port, address.token, lost)

    @property
    def has_joined(self) -> bool:
        return self._process in self._hosts.joined

    def join(self, store: RankStore, ranks: Ranks, host: str, device: str) -> Ranks:
        assert isinstance(store, RankStoreClient)
        self._hosts.joined.add(self._process)
        values = {each.name: getattr(ranks, each.name) for each in fields(ranks)}
        joined = SimulatedRanks(**values, process=self._process, collectives=store.server.collectives)
        joined.maximum(0)
        return joined


class _Stopping:
    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process

    def is_set(self) -> bool:
        return self._process.stopping

    def wait(self, seconds: float, /) -> bool:
        deadline = self._process.scheduler.now + seconds
        while not self._process.stopping and self._process.scheduler.now < deadline:
            self._process.sleep(STOP_POLL_S)
        return self._process.stopping


class _SlowSystem(SimulatedSystem):
    """The services of a process whose threads take a moment for each job."""

    def __init__(self, system: SimulatedSystem) -> None:
        super().__init__(system.process, system.network, system.host, system.names)

    def pause(self) -> None:
        """Wait a moment."""
        self.sleep(JOB_S * self.names.random() ** 6)

    def pool(self, threads: int, name: str, begin: Callable[[], None] = lambda: None) -> SimulatedPool:
        """Fibers that wait a moment before and after each job."""
        return _SlowPool(self, threads, name)


class _SlowPool(SimulatedPool):
    def __init__(self, system: _SlowSystem, threads: int, name: str) -> None:
        super().__init__(system.process, threads, name)
        self._system = system

    def submit(self, job: Callable[..., T], /, *arguments: Any) -> Future[T]:
        """Queue a job."""

        def run() -> T:
            self._system.pause()
            result = job(*arguments)
            self._system.pause()
            return result

        return super().submit(run)
