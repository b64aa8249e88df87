"""What transfers bytes in a simulated run: relays, the trainer's publisher, replicas with weights and KV.

The emulated trainer publishes versions with bytes, and replicas load them and hand over KV with bytes. What a replica
loads is compared with what the trainer has published.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from infra.kafka.producer import DeliveryFailed
from infra.kafka.role_notes import notes_reader
from infra.kafka.simulated_clients import SimulatedClients
from infra.simulation.process import SimulatedProcess
from infra.store.errors import StoreError
from infra.store.publisher import PublishFailed, copy_array
from infra.store.weight_store import WeightStore
from infra.transport.endpoint import Endpoint
from infra.transport.kv_transfer import KVTransfers
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored, ShardFold
from operators.io.fold_records import FoldStep
from operators.relay.relay import RelayFold, RelayStep
from operators.rollout.engine import Completion, Engine, EngineStatus, PartialResponse, Request
from operators.rollout.wrapped_engine import WrappedEngine
from operators.trainer.emulate_training import EmulateTraining
from operators.trainer.publishing import Publishing, PublishSettings
from pipelines.config import Config
from pipelines.simulate.hosts import TOKEN, SimulatedHosts
from pipelines.simulate.transferred_bytes import KV_BYTES, SPECS, file_of, kv_of, tensors_of
from schemas.records import PolicyVersion, RelayChain, WeightVersion

COPY_S = 0.05
"""Seconds in which the trainer copies a tensor into the store."""
KV_CHUNK_BYTES = 8 * KV_BYTES
ReportViolation = Callable[[str], None]
"""Called with a violation of an invariant."""


class Transfers:
    """The weights and KV of a run with `config` on `hosts`; `violated` is called with what is wrong with them."""

    def __init__(self, config: Config, hosts: SimulatedHosts, violated: ReportViolation) -> None:
        self._config, self._hosts, self._violated = config, hosts, violated

    def relay(
        self, step: RelayStep, restored: Restored, process: SimulatedProcess, clients: SimulatedClients
    ) -> RelayFold:
        """The relay of the host of `process`."""
        system = self._hosts.system(process)
        store, endpoint = self._hosts.open_store(process, step.config.keep_versions), Endpoint(system.host, token=TOKEN)
        producer: Any = clients.plain_producer
        return step.open(restored, store, endpoint, producer, system.host, lambda: process.unix_ms() / 1000, system)

    def training(
        self, step: EmulateTraining, restored: Restored, process: SimulatedProcess, clients: SimulatedClients
    ) -> RelayedTraining:
        """The trainer."""
        return RelayedTraining(step, restored, process, clients, self._hosts, self._config)

    def weights(self, process: SimulatedProcess) -> WeightStore:
        """The weights that the replicas of `process` load."""
        return self._hosts.open_store(process, self._config.relay.keep_versions)

    def engine(self, engine: Engine, replica: int) -> CheckedEngine:
        """`engine` of a replica, with bytes."""
        return CheckedEngine(engine, replica, self._hosts, self._violated)

    def kv(self, process: SimulatedProcess) -> KVTransfers:
        """The KV that `process` offers and fetches."""
        system, most = self._hosts.system(process), self._config.rollout.kv_megabytes * 1_000_000
        endpoint = Endpoint(system.host, token=TOKEN)
        return KVTransfers(self._config.run.name, endpoint, most, chunk_bytes=KV_CHUNK_BYTES, system=system)

    def rank(
        self, step: FoldStep, restored: Restored, process: SimulatedProcess, clients: SimulatedClients
    ) -> ShardFold:
        """A rank of the real trainer. Raises TypeError for another step."""
        from pipelines.simulate.simulated_ranks import restore_rank  # deferred: imports torch

        return restore_rank(step, restored, process, clients, self._hosts, self._violated)


class RelayedTraining(ShardFold):
    """An emulated trainer whose versions have bytes: it publishes them as the real one does."""

    def __init__(
        self,
        step: EmulateTraining,
        restored: Restored,
        process: SimulatedProcess,
        clients: SimulatedClients,
        hosts: SimulatedHosts,
        config: Config,
    ) -> None:
        system, self._hosts = hosts.system(process), hosts
        published = restored.state.get("trained", {}).get("published")
        parent = PolicyVersion.parse(published) if published else None
        settings = PublishSettings(TOKEN, config.relay.chunk_bytes, deltas=config.relay.deltas)
        producer: Any = clients.plain_producer

        def copy(target: np.ndarray, array: np.ndarray) -> None:
            system.sleep(COPY_S)
            copy_array(target, array)

        self._publishing = Publishing(
            hosts.open_store(process, config.relay.keep_versions),
            producer,
            step.shard.run,
            SPECS,
            parent,
            settings,
            host=system.host,
            copy=copy,
            now=process.unix_ms,
            system=system,
        )
        self._resumed = None if parent is None else hosts.published.get(parent)
        notes = notes_reader(step.shard.run, clients.observer)
        self._fold = step.restore(restored, None, process.monotonic, process.unix_ms, self._publish, notes)

    def fold(self, polled: Polled) -> Sequence[Output]:
        """As the emulated trainer's. The version from which it goes on is delivered again, as the real one does."""
        for received in polled.records:
            if isinstance(received.record, RelayChain):
                self._publishing.set_chain(received.record)
        if self._resumed is not None:
            with suppress(StoreError, PublishFailed):
                self._publishing.restore_version(
                    tensors_of(self._hosts.content_of(self._resumed.version)), self._resumed
                )
            self._resumed = None
        return self._fold.fold(polled)

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        """As the emulated trainer's."""
        return self._fold.checkpoint(positions)

    def close(self) -> None:
        """Close the publisher and the store."""
        self._fold.close()
        self._publishing.close()

    def _publish(self, manifest: WeightVersion) -> None:
        """Publish the bytes and the manifest of a version. Raises DeliveryFailed: publish it again."""
        publisher = self._publishing.publisher
        try:
            publisher.publish(
                tensors_of(self._hosts.content_of(manifest.version)),
                manifest.version,
                step=manifest.step,
                batches=manifest.batches,
                batch_offsets=manifest.batch_offsets,
                trajectories_trained=manifest.trajectories_trained,
                untrained=manifest.untrained_batches,
                final=manifest.final,
            )
            publisher.flush()
        except (PublishFailed, StoreError) as error:
            raise DeliveryFailed(f"version {manifest.version} is not published: {error}") from error


class CheckedEngine(WrappedEngine):
    """An emulated engine of replica `replica` that checks the bytes of weights and KV, and hands KV over with bytes."""

    def __init__(self, engine: Engine, replica: int, hosts: SimulatedHosts, violated: ReportViolation) -> None:
        super().__init__(engine)
        self._replica, self._hosts, self._violated = replica, hosts, violated
        hosts.loaded[replica] = None

    def load(self, weights: Path, version: PolicyVersion) -> None:
        """Check the bytes of a version, and load it."""
        if weights.read_bytes() != file_of(self._hosts.content_of(version)):
            self._violated(f"replica {self._replica} loads version {version} with other bytes than its trainer's")
        super().load(weights, version)
        self._hosts.loaded[self._replica] = version

    def submit(self, request: Request) -> None:
        """Check the KV of a request, and queue it."""
        kv = None if request.partial is None else request.partial.kv
        if kv is not None and request.partial is not None and self.version is not None:
            tokens = len(request.prompt) + len(request.partial.token_ids) - 1
            if kv.tokens != tokens or kv.data != kv_of(request.trajectory_id, self.version, tokens):
                self._violated(
                    f"{request.trajectory_id} continues on replica {self._replica} with KV of {kv.tokens} tokens that "
                    f"is not its own of {tokens} tokens under version {self.version}"
                )
        self._engine.submit(request)

    def step(self) -> Sequence[Completion]:
        """As the engine's."""
        return self._engine.step()

    def due(self) -> float:
        """As the engine's."""
        return self._engine.due()

    def release(self, trajectory_ids: Collection[str], *, with_kv: bool = False) -> dict[str, PartialResponse]:
        """As the engine's, with bytes."""
        version, released = self.version, self._engine.release(trajectory_ids, with_kv=with_kv)
        return {name: self._with_bytes(name, version, partial) for name, partial in released.items()}

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """As the engine's."""
        return self._engine.generated(since)

    def status(self) -> EngineStatus:
        """As the engine's."""
        return self._engine.status()

    def _with_bytes(self, name: str, version: PolicyVersion | None, partial: PartialResponse) -> PartialResponse:
        if partial.kv is None or version is None:
            return partial
        data = memoryview(kv_of(name, version, partial.kv.tokens))
        return replace(partial, kv=replace(partial.kv, data=data))
