"""GenerateTrajectories: consumes assignments and publishes trajectories of the replicas that this process hosts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from infra.clocks import wall_ms
from infra.kafka.producer import BoundedProducer
from infra.models.chat import MessageFrame
from infra.runners.step_metrics import phase
from infra.runners.stopping import NOTICE
from infra.transport.endpoint import Endpoint
from infra.transport.kv_transfer import KVTransfers
from operators.io.config import ShardConfig
from operators.io.dead_letters import dead_letter
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored
from operators.io.newest_manifest import NewestManifest
from operators.rollout.agent_episodes import AgentEngine
from operators.rollout.backend import Backend, BackendSpec
from operators.rollout.config import RolloutConfig
from operators.rollout.departure import Departure, Notice
from operators.rollout.engine import Engine
from operators.rollout.environments.pool import EnvironmentPool
from operators.rollout.episodes import EpisodeEngine
from operators.rollout.heartbeats import Heartbeats
from operators.rollout.pending_events import PendingEvents
from operators.rollout.replica import Replica, ReplicaEvent, ReplicaOrder
from operators.rollout.two_versions import TwoVersionEngine
from schemas.records import PolicyVersion, WeightVersion

FENCE_PROBE_S = 5.0
"""An idle process detects after at most so many seconds that it was fenced."""
VERSIONS_KEPT = 16
"""The newest weight versions, which the commit note lists: a restart reads only the newest manifest again."""
_VERSIONS = "versions"


@dataclass(frozen=True)
class GenerateTrajectories:
    """Hosts the replicas of process `process` over `backend`; their incarnation is the start number.

    If `interrupts`, newer weights are loaded while trajectories run; with `two_versions`, beside those of trajectories
    that run. Other processes fetch the KV of handed-over trajectories at `endpoint`. `frames` has the message frame of
    each environment whose observations are messages.
    """

    config: RolloutConfig
    shard: ShardConfig
    backend: BackendSpec
    process: int
    endpoint: Endpoint
    interrupts: bool = False
    two_versions: bool = False
    frames: Mapping[str, MessageFrame] = field(default_factory=dict)

    def restore(self, restored: Restored) -> RolloutFold:
        producer, run = BoundedProducer(self.shard.client), self.shard.run
        hosted = self.config.hosted(self.process)
        heartbeats = Heartbeats(
            *(producer, run, self.process, hosted, restored.start),
            *(self.config.heartbeat_s, self.config.step_timeout_s),
            first_incarnation=restored.first_start,
        )
        kv_transfers = None
        pools: dict[str, EnvironmentPool] = {}
        try:
            if self.config.kv_megabytes:
                kv_transfers = KVTransfers(run, self.endpoint, self.config.kv_megabytes * 1_000_000)
            backend = self.backend.open()
            for spec in self.config.environments:
                pools[spec.resolved_name] = EnvironmentPool(spec)
            replicas = [self._replica(index, restored.start, backend, pools, kv_transfers) for index in hosted]
        except BaseException:
            heartbeats.close()
            if kv_transfers is not None:
                kv_transfers.close()
            for pool in pools.values():
                pool.close()
            raise
        heartbeats.set_replicas(replicas)
        if self.config.termination_notice_s:
            NOTICE.accept()
        return RolloutFold(
            self.config,
            replicas,
            heartbeats,
            backend,
            state=restored.state,
            kv_transfers=kv_transfers,
            pools=pools.values(),
        )

    def _replica(
        self,
        index: int,
        incarnation: int,
        backend: Backend,
        pools: Mapping[str, EnvironmentPool],
        kv_transfers: KVTransfers | None,
    ) -> Replica:
        def with_episodes(engine: Engine) -> EpisodeEngine:
            return EpisodeEngine(engine, pools, backend.encode, backend.decode, self.frames)

        staging, may_load = None, None
        engine: Engine
        if self.two_versions:
            engine = TwoVersionEngine(*map(with_episodes, backend.engine_pair()))
            may_load = engine.may_load
        else:
            whole = backend.engine()
            staging = backend.staging(index, incarnation, whole, kv_transfers)
            engine = AgentEngine(with_episodes(whole), self.config.agent_kv_megabytes * 1_000_000)
        return Replica(
            index,
            incarnation,
            engine,
            backend.weights,
            backend.decode,
            wall_ms,
            self.config,
            interrupts=self.interrupts,
            kv_transfers=kv_transfers,
            check=backend.check,
            staging=staging,
            may_load=may_load,
        )


class RolloutFold:
    def __init__(
        self,
        config: RolloutConfig,
        replicas: Sequence[Replica],
        heartbeats: Heartbeats,
        backend: Backend,
        clock: Callable[[], float] = time.monotonic,
        *,
        state: Mapping[str, Any] = MappingProxyType({}),
        kv_transfers: KVTransfers | None = None,
        pools: Collection[EnvironmentPool] = (),
        notice: Notice = NOTICE,
    ) -> None:
        self._config, self._heartbeats, self._clock = config, heartbeats, clock
        self._backend, self._kv_transfers, self._pools = backend, kv_transfers, pools
        self._replicas = {replica.index: replica for replica in replicas}
        self._departure = Departure(notice, config.termination_notice_s, replicas, kv_transfers, clock)
        self._pending = PendingEvents(self._replicas.values(), config.linger_s, clock)
        self._versions: list[PolicyVersion] = []
        self._newest_manifest = NewestManifest()
        for version in state.get(_VERSIONS, ()):
            self._announce(PolicyVersion.parse(version))

    def fold(self, polled: Polled) -> list[Output | ReplicaEvent]:
        dead_letters: list[Output] = []
        if self._kv_transfers is not None:
            self._kv_transfers.expire()
        if self._departure.begin():
            self._heartbeats.send_now()
        with phase("accept assignments"):
            for received in polled.records:
                if isinstance(received.record, WeightVersion):
                    self._newest_manifest.record(received)
                    self._announce(received.record.version, received.record)
                elif received.record.replica in self._replicas:
                    self._handle(received.record)
                else:
                    reason = f"replica {received.record.replica} is not hosted here"
                    dead_letters.append(dead_letter(received, "generate trajectories", reason, wall_ms()))
        if polled.last:
            for replica in self._replicas.values():
                # Other replicas resume the running trajectories from the progress published here.
                self._pending.add(replica.report_progress(), urgent=True)
        elif not self._pending.urgent:  # urgent events are published before the next step
            with phase("generate"):
                self._generate()
        outputs = [*dead_letters, *self._pending.take_due()]
        self._departure.end_if_done(published=not self._pending)
        return outputs

    def _handle(self, order: ReplicaOrder) -> None:
        replica = self._replicas[order.replica]
        news = replica.changes
        self._pending.add(replica.carry_out(order), urgent=True)
        if replica.changes != news:
            self._heartbeats.send_now()

    def _announce(self, version: PolicyVersion, manifest: WeightVersion | None = None) -> None:
        """Record a version that was published during this start (with its manifest) or before it."""
        self._versions = sorted({*self._versions, version})[-VERSIONS_KEPT:]
        self._backend.announce(version)
        for replica in self._replicas.values():
            replica.announce(version, manifest)

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        versions = list(map(str, self._versions))
        low_water = self._newest_manifest.low_water(positions)
        # `alive` changes from time to time, which makes a commit due: an idle process must detect that it was fenced.
        return Checkpoint(low_water, state={"alive": int(self._clock() // FENCE_PROBE_S), _VERSIONS: versions})

    def busy(self) -> bool:
        return any(replica.busy() for replica in self._replicas.values())

    def due(self) -> float:
        """Seconds until the turn of an agent may end; other results may wait for the next poll."""
        return min((replica.turn_due() for replica in self._replicas.values()), default=math.inf)

    def close(self) -> None:
        self._heartbeats.close()
        for replica in self._replicas.values():
            replica.close()
        self._backend.close()
        if self._kv_transfers is not None:
            self._kv_transfers.close()
        for pool in self._pools:
            pool.close()

    def _generate(self) -> None:
        """Step the engines in turn for `step_s` seconds; an idle replica still checks for newer weights."""
        until = self._clock() + self._config.step_s
        while True:
            with self._heartbeats.step():
                for replica in self._replicas.values():
                    news = replica.changes
                    self._pending.add(replica.step())
                    if replica.changes != news:
                        self._heartbeats.send_now()
            busy = any(replica.busy() for replica in self._replicas.values())
            if self._pending.urgent or self._clock() >= until or not busy:
                return
