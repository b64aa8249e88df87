"""The relay of one machine: fetches the newest version, checks stored versions against manifests, and reports them.

This is the control plane; the threads of a `RelayNode` transfer the bytes. A version is held when it is complete in the
store and its seal matches its manifest. A manifest whose bytes are not here (evicted, or not yet arrived) waits; a
manifest that does not match the seal or the arriving bytes becomes a dead letter.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.kafka.heartbeat_thread import Heartbeat, HeartbeatThread
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.machine import VARIABLE as MACHINE
from infra.machine import machine_name
from infra.runners.step_metrics import phase
from infra.store.errors import VersionGone
from infra.store.incoming_version import Seal
from infra.store.names import weight_file
from infra.store.ownership import remove_ended_stores
from infra.store.weight_store import WeightStore, versions_to_evict
from infra.system import SYSTEM, System
from infra.transport.endpoint import Endpoint
from infra.transport.relay_node import RelayNode
from operators.io.dead_letters import dead_letter
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, ReceivedRecord, Restored, ShardFold
from operators.relay.config import AUTO, RelayConfig
from operators.relay.tiers import NO_TIERS, Tiers, open_tiers
from schemas.records import PolicyVersion, RelayArrival, RelayChain, RelayStatus, ReplicaStatus, WeightVersion
from schemas.topics import RELAY, REPLICAS

log = logging.getLogger(__name__)

FREE_EVERY_S = 600.0
"""A new version frees the memory of ended runs, at most once in this time."""
_REFUSED = "refused"
_MAX_WAITING = 8
"""Maximum of manifests of one version that wait for its bytes."""
_MAX_REFUSED = 64
"""Maximum of offsets of rejected manifests in a commit note."""


def free_ended_runs(store: Path) -> None:
    """On a machine of a cluster, remove the stores of ended runs beside `store`."""
    if MACHINE in os.environ:
        for root in remove_ended_stores(store):
            log.warning("removed %s, the weights of a run that has ended", root)


def manifest_mismatch(manifest: WeightVersion, seal: Seal) -> str | None:
    """Why `manifest` does not match the sealed bytes; None if it does."""
    fields = {
        "file": (manifest.file, weight_file(seal.version)),
        "bytes": (manifest.bytes, seal.bytes),
        "blake3": (manifest.blake3, seal.blake3),
    }
    wrong = [
        f"{name} {declared!r} but the store has {held!r}"
        for name, (declared, held) in fields.items()
        if declared != held
    ]
    return f"the manifest of version {manifest.version} declares {', '.join(wrong)}" if wrong else None


def versions_to_forget(
    waiting: Collection[PolicyVersion], held: Collection[PolicyVersion], live: Sequence[PolicyVersion], keep: int
) -> list[PolicyVersion]:
    """Of the versions `waiting` for their bytes, those that would be evicted on arrival."""
    gone = versions_to_evict([*{*waiting, *held}], live, keep)
    return [version for version in waiting if version in gone]


@dataclass(frozen=True)
class RelayStep:
    """Folds the relay topic over the store in folder `config.store`, and publishes heartbeats through `client`.

    Raises ValueError if `config.store` is "auto": the folder must have been chosen.
    """

    config: RelayConfig
    client: ClientProperties
    run: str

    def __post_init__(self) -> None:
        if self.config.store == AUTO:
            raise ValueError('store is still "auto": call choose_store_folder once for each machine')

    def restore(self, restored: Restored) -> RelayFold:
        """Return a relay without manifests; reading resumes at the oldest manifest that it needs.

        That of a machine of a cluster first frees the memory of ended runs, which nobody else can.
        """
        free_ended_runs(Path(self.config.store))
        store = WeightStore(Path(self.config.store), self.config.keep_versions)
        endpoint = self.config.endpoint(self.client.bootstrap_servers)
        return self.open(restored, store, endpoint, lambda: BoundedProducer(self.client))

    def open(
        self,
        restored: Restored,
        store: WeightStore,
        endpoint: Endpoint,
        open_producer: Callable[[], BoundedProducer],
        host: str | None = None,
        wall_s: Callable[[], float] = time.time,
        system: System = SYSTEM,
    ) -> RelayFold:
        """As `restore`, over `store`, which it closes, on `host` (default: this machine)."""
        config = self.config
        tiers = open_tiers(config, self.run, store, system)
        links = config.link(), config.link()
        copies = None if tiers.disk is None else tiers.disk.copies
        node = RelayNode(store, self.run, config.relay, endpoint, *links, system, copies, tiers.objects)
        fold = RelayFold(config, store, node, restored.state, system.monotonic, wall_s, host, tiers)
        try:
            producer = open_producer()
        except BaseException:
            fold.close()
            raise
        fold.heartbeats = HeartbeatThread(
            "heartbeats", producer, lambda: self._heartbeats(fold), config.heartbeat_s, system=system
        )
        return fold

    def _heartbeats(self, fold: RelayFold) -> list[Heartbeat]:
        topic, relay, status = REPLICAS.name(self.run), self.config.relay, fold.status()
        if status is None:
            return []
        arrival = fold.arrival(status)
        return [
            Heartbeat(topic, f"relay-{relay}", status),
            *([] if arrival is None else [Heartbeat(topic, f"arrival-{relay}", arrival)]),
        ]


class RelayFold(ShardFold):
    """The state of a relay during one start: the manifests of held versions and of versions that are awaited."""

    heartbeats: HeartbeatThread | None = None
    """The thread that publishes `status`; closed with this object."""

    def __init__(
        self,
        config: RelayConfig,
        store: WeightStore,
        node: RelayNode,
        state: Mapping[str, object],
        clock: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
        host: str | None = None,
        tiers: Tiers = NO_TIERS,
    ) -> None:
        self._tiers = tiers
        self._config, self._clock, self._wall_s = config, clock, wall_s
        self._store = store
        self._node = node
        self._status = StatusMaker(node, str(store.root), clock(), machine_name() if host is None else host)
        self._live: dict[int, PolicyVersion] = {}
        """The version under which each replica generates."""
        self._needed: tuple[PolicyVersion, ...] = ()
        """The versions that waiting evaluation work names."""
        self._waiting: dict[PolicyVersion, list[ReceivedRecord]] = {}
        """Manifests of versions that are not here; several of one version may differ, then at most one is valid."""
        self._held: dict[PolicyVersion, ReceivedRecord] = {}
        self._reported: tuple[tuple[PolicyVersion, ...], int] | None = None
        """The held versions, newest first, and their bytes; one object, since the heartbeat thread reads it."""
        self._freed_at = clock()
        """When the memory of ended runs was freed."""
        self._is_checked = False
        """Whether the size of the store has been compared with that of a version."""
        refused = state.get(_REFUSED, [])
        self._refused = set(refused) if isinstance(refused, list) else set()

    def fold(self, polled: Polled) -> Sequence[Output]:
        """Return dead letters for invalid manifests."""
        outputs: list[Output] = []
        if self._store.create_if_removed():
            log.warning("%s was removed: the versions that are needed are fetched again", self._store.root)
            self._store.write_live_versions(self._kept_versions())
        with phase("track manifests"):
            for received in polled.records:
                outputs += self._track(received)
        with phase("evict versions"):
            self._store.evict()
        complete = set(self._store.versions())
        for version in self._held.keys() - complete:  # evicted: forgotten below; lost: fetched again
            self._waiting.setdefault(version, []).append(self._held.pop(version))
        with phase("verify versions"):
            for version in self._waiting.keys() & complete:
                for received in self._waiting.pop(version):
                    outputs += self._verify(received)
        for version in versions_to_forget(self._waiting, self._held, self._kept_versions(), self._config.keep_versions):
            del self._waiting[version]
        for waiting_manifests in self._waiting.values():
            del waiting_manifests[:-_MAX_WAITING]
        for manifest, reason in self._node.take_invalid_manifests():
            outputs += self._reject_invalid(manifest, reason)
        self._node.set_manifests(waiting_manifests[-1].record for waiting_manifests in self._waiting.values())
        if polled.caught_up or self._reported is not None:
            held = tuple(sorted(self._held, reverse=True))
            self._reported = held, sum(self._held[version].record.bytes for version in held)
            if held:
                self._tiers.keep(held[0], self._node.is_master)
        return outputs

    def _track(self, received: ReceivedRecord) -> list[Output]:
        match received.record:
            case WeightVersion() as manifest:
                self._check_size(manifest.bytes)
                if self._clock() - self._freed_at >= FREE_EVERY_S:  # runs may have ended since
                    self._freed_at = self._clock()
                    free_ended_runs(self._store.root)
                self._waiting.setdefault(manifest.version, []).append(received)
            case RelayChain() as chain:
                self._node.set_chain(chain)
                if chain.needed != self._needed:
                    self._needed = chain.needed
                    self._store.write_live_versions(self._kept_versions())
            case ReplicaStatus() as replica:
                self._record_replica_version(replica)
            case other:
                return self._dead_letter(received, f"a relay does not consume {type(other).__name__} records")
        return []

    def _check_size(self, version_bytes: int) -> None:
        """Report a store that, empty, is too small for the versions that it is to keep and the one that arrives."""
        if self._is_checked:
            return
        self._is_checked, needed = True, version_bytes * (self._config.keep_versions + 1)
        disk = os.statvfs(self._store.root)
        if (size := disk.f_frsize * disk.f_blocks) < needed:
            log.error(
                "%s has %d bytes, but relay.keep_versions = %d and the version that arrives need %d: enlarge it, keep "
                "fewer, or set relay.store",
                *(self._store.root, size, self._config.keep_versions, needed),
            )

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        """Resume at the oldest manifest that is needed; save which manifests were rejected."""
        place = PartitionKey(RELAY.short_name, 0)
        needed = [each.offset for group in (*self._waiting.values(), self._held.values()) for each in group]
        self._refused = set(sorted(self._refused)[-_MAX_REFUSED:])
        low_water = {**positions, place: min(needed, default=positions[place])}
        return Checkpoint(low_water, state={_REFUSED: sorted(self._refused)})

    def status(self) -> RelayStatus | None:
        """The current heartbeat; None before all manifests have been read, since a relay that reports no versions loses
        the role of master. Any thread may call this, one at a time.
        """
        if self._reported is None:
            return None
        held, size = self._reported
        return self._status.make(held, size, self._clock(), self._wall_ms())

    def arrival(self, status: RelayStatus) -> RelayArrival | None:
        """The arrived chunks of a version, to publish with heartbeat `status`; None if there is nothing to report."""
        return self._status.arrival(status)

    def close(self) -> None:
        """Stop serving and close the store; the versions in it stay."""
        if self.heartbeats is not None:
            self.heartbeats.close()
        self._node.close()
        self._tiers.close()
        self._store.close()

    def _kept_versions(self) -> list[PolicyVersion]:
        """The versions that the store evicts last: those that are needed, then those of replicas, newest first."""
        return [*self._needed, *sorted(set(self._live.values()).difference(self._needed), reverse=True)]

    def _record_replica_version(self, replica: ReplicaStatus) -> None:
        """Record the version under which a replica generates."""
        if replica.policy_version is None or replica.state == "stopped":
            self._live.pop(replica.replica, None)
        elif self._live.get(replica.replica) != replica.policy_version:
            self._live[replica.replica] = replica.policy_version
            self._store.write_live_versions(self._kept_versions())

    def _reject_invalid(self, manifest: WeightVersion, reason: str) -> list[Output]:
        """Drop manifests that the data plane has found to be invalid."""
        waiting_manifests = self._waiting.get(manifest.version, [])
        invalid = [received for received in waiting_manifests if received.record == manifest]
        self._waiting[manifest.version] = [received for received in waiting_manifests if received.record != manifest]
        if not self._waiting[manifest.version]:
            del self._waiting[manifest.version]
        return [output for received in invalid for output in self._dead_letter(received, reason)]

    def _verify(self, received: ReceivedRecord) -> list[Output]:
        """Check a manifest whose version is complete in the store."""
        try:
            reason = manifest_mismatch(received.record, self._store.seal(received.record.version))
        except VersionGone:  # another process has just evicted it, or it was lost
            self._waiting.setdefault(received.record.version, []).append(received)
            return []
        if reason is not None:
            return self._dead_letter(received, reason)
        self._held[received.record.version] = received
        return []

    def _dead_letter(self, received: ReceivedRecord, reason: str) -> list[Output]:
        if received.offset in self._refused:  # read again after a restart
            return []
        self._refused.add(received.offset)
        return [dead_letter(received, "relay", reason, self._wall_ms())]

    def _wall_ms(self) -> int:
        return int(self._wall_s() * 1000)


class StatusMaker:
    """Builds the heartbeats of one relay; rates are averages since the previous heartbeat."""

    def __init__(self, node: RelayNode, store: str, now: float, host: str) -> None:
        self._node, self._store, self._host = node, store, host
        self._before = (now, 0, 0)
        self._reported = False

    def make(self, held: Sequence[PolicyVersion], size: int, now: float, wall_ms: int) -> RelayStatus:
        """Return the heartbeat at `now` (monotonic seconds) for `held` versions, newest first, of `size` bytes."""
        node = self._node
        received, sent = node.receiving.bytes_passed, node.sending.bytes_passed
        at, received_before, sent_before = self._before
        seconds = max(now - at, 1e-3)
        self._before = (now, received, sent)
        arrival = node.arriving()
        return RelayStatus(
            relay=node.relay,
            versions=tuple(map(str, held)),
            bytes=size,
            host=self._host,
            pid=os.getpid(),
            sent_at=wall_ms,
            address=node.address,
            store=self._store,
            arriving=arrival.version if arrival else None,
            arrived_bytes=arrival.arrived if arrival else 0,
            arriving_bytes=arrival.bytes if arrival else 0,
            received=received,
            sent=sent,
            received_per_s=(received - received_before) / seconds,
            sent_per_s=(sent - sent_before) / seconds,
            corrupted_chunks=node.counts.corrupted,
            lost_sources=node.counts.lost,
            chain_number=node.chain.number if node.chain else 0,
            unreachable=node.unreachable(),
        )

    def arrival(self, status: RelayStatus) -> RelayArrival | None:
        """The arrived chunks of the version that is being fetched, with the rates of `status`.

        Once the fetch has ended an empty record follows; then None.
        """
        now, rate = self._node.arriving(), status.received_per_s
        reported, self._reported = self._reported, now is not None
        if now is None and not reported:
            return None
        left = -1.0 if now is None or rate <= 0 else (now.bytes - now.arrived) / rate
        return RelayArrival(
            relay=status.relay,
            host=status.host,
            store=status.store,
            version=None if now is None else now.version,
            chunks=() if now is None else now.chunks,
            bytes_per_s=rate,
            seconds_left=left,
            sent_at=status.sent_at,
        )
