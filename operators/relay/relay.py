"""The relay of one machine: has the newest version fetched, checks all it has against the manifests, and says so.

This is the control plane; bytes move in the threads of a `RelayNode` beside it. A version counts as held when it is
complete in the store and its seal is what its manifest claims. A manifest whose bytes are not here (evicted, or not
arrived yet) claims nothing false and waits; one that the seal, or what arrives, contradicts is a dead letter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.kafka.heartbeat_thread import Heartbeat, HeartbeatThread
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.store.arriving import Seal
from infra.store.errors import VersionGone
from infra.store.names import weight_file
from infra.store.weight_store import WeightStore, to_evict
from infra.transport.relay_node import RelayNode
from operators.io.dead_letters import dead_letter
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, ReceivedRecord, Restored
from operators.relay.config import AUTO, RelayConfig
from operators.relay.status import StatusMaker
from schemas.records import PolicyVersion, RelayChain, RelayStatus, ReplicaStatus, WeightVersion
from schemas.topics import RELAY, REPLICAS

_REFUSED = "refused"
_MAX_CLAIMS = 8
"""Manifests of one version that wait for its bytes."""
_MAX_REFUSED = 64
"""Offsets of refused manifests that a commit's note has room for."""


def contradiction(manifest: WeightVersion, seal: Seal) -> str | None:
    """Why `manifest` does not describe the sealed bytes; None if it does."""
    claims = {
        "file": (manifest.file, weight_file(seal.version)),
        "bytes": (manifest.bytes, seal.bytes),
        "blake3": (manifest.blake3, seal.blake3),
    }
    wrong = [f"{name} {said!r} where the store has {held!r}" for name, (said, held) in claims.items() if said != held]
    return f"the manifest of version {manifest.version} claims {', '.join(wrong)}" if wrong else None


def relay_key(relay: int) -> str:
    """The key of a relay's heartbeats in the replicas topic."""
    return f"relay-{relay}"


def to_forget(
    waiting: Collection[PolicyVersion], held: Collection[PolicyVersion], live: Collection[PolicyVersion], keep: int
) -> list[PolicyVersion]:
    """Of the versions whose bytes are not here, those that would be evicted if they came."""
    gone = to_evict([*{*waiting, *held}], live, keep)
    return [version for version in waiting if version in gone]


def resume_from(position: int, needed: Collection[int]) -> int:
    """The offset from which a restart must read: that of the oldest manifest it needs, else `position`."""
    return min(needed, default=position)


@dataclass(frozen=True)
class RelayStep:
    """Folds the relay topic over the store in folder `config.store`, which must be settled by now.

    Heartbeats go out beside it, through `client`. Raises ValueError while the folder is still to be found.
    """

    config: RelayConfig
    client: ClientProperties
    run: str

    def __post_init__(self) -> None:
        if self.config.store == AUTO:
            raise ValueError("the store's folder is not settled: ask place_store once a machine")

    def restore(self, restored: Restored) -> RelayFolder:
        """A relay that knows no manifest yet: reading resumes at the oldest that it needs."""
        config = self.config
        store = WeightStore(Path(config.store), config.keep_versions)
        node = RelayNode(store, self.run, config.relay, config.door(), config.link(), config.link())
        folder = RelayFolder(config, store, node, restored.state)
        try:
            producer = BoundedProducer(self.client)
        except BaseException:
            folder.close()
            raise
        folder.heartbeats = HeartbeatThread(
            "heartbeats", producer, lambda: self._heartbeats(folder), config.heartbeat_s
        )
        return folder

    def _heartbeats(self, folder: RelayFolder) -> list[Heartbeat]:
        topic, key, status = REPLICAS.name(self.run), relay_key(self.config.relay), folder.status()
        return [] if status is None else [Heartbeat(topic, key, status)]


class RelayFolder:
    """What a relay knows during one start: the manifests of versions that are here, and of newer ones that are not."""

    heartbeats: HeartbeatThread | None = None
    """What publishes `status`, in a thread of its own; closed with the folder."""

    def __init__(
        self,
        config: RelayConfig,
        store: WeightStore,
        node: RelayNode,
        state: Mapping[str, object],
        clock: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._clock, self._wall_s = config, clock, wall_s
        self._store = store
        self._node = node
        self._status = StatusMaker(node, str(store.root), clock())
        self._live: dict[int, PolicyVersion] = {}
        """What each replica generates under."""
        self._waiting: dict[PolicyVersion, list[ReceivedRecord]] = {}
        """What is claimed of versions that are not here; claims may differ, and one lies then."""
        self._held: dict[PolicyVersion, ReceivedRecord] = {}
        self._complete: tuple[tuple[PolicyVersion, ...], int] | None = None
        """The versions held, newest first, and their bytes: replaced as one, for the heartbeats' thread reads it."""
        refused = state.get(_REFUSED, [])
        self._refused = set(refused) if isinstance(refused, list) else set()

    def fold(self, polled: Polled) -> Sequence[Output]:
        """Dead letters for manifests that lie."""
        outputs: list[Output] = []
        for received in polled.records:
            match received.record:
                case WeightVersion() as manifest:
                    self._waiting.setdefault(manifest.version, []).append(received)
                case RelayChain() as chain:
                    self._node.obey(chain)
                case ReplicaStatus() as replica:
                    self._hear(replica)
                case other:
                    outputs += self._refuse(received, f"a relay cannot read a {type(other).__name__}")
        self._store.evict()
        complete = set(self._store.versions())
        for version in self._held.keys() - complete:
            del self._held[version]
        for version in self._waiting.keys() & complete:
            for received in self._waiting.pop(version):
                outputs += self._judge(received)
        live = set(self._live.values())
        for version in to_forget(self._waiting, self._held, live, self._config.keep_versions):
            del self._waiting[version]
        for claims in self._waiting.values():
            del claims[:-_MAX_CLAIMS]
        for manifest, reason in self._node.lies():
            outputs += self._disbelieve(manifest, reason)
        self._node.learn(claims[-1].record for claims in self._waiting.values())
        if polled.caught_up or self._complete is not None:
            held = tuple(sorted(self._held, reverse=True))
            self._complete = held, sum(self._held[version].record.bytes for version in held)
        return outputs

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        """Resume at the oldest manifest that is needed; remember which manifests were refused."""
        place = PartitionKey(RELAY.noun, 0)
        needed = [claim.offset for claims in (*self._waiting.values(), self._held.values()) for claim in claims]
        low_water = resume_from(positions[place], needed)
        self._refused = set(sorted(self._refused)[-_MAX_REFUSED:])
        return Checkpoint({**positions, place: low_water}, state={_REFUSED: sorted(self._refused)})

    def status(self) -> RelayStatus | None:
        """What a heartbeat says right now; None before all manifests have been read: placement takes a relay that says
        to hold nothing out of the master's place. Any thread may ask, one at a time.
        """
        if self._complete is None:
            return None
        held, size = self._complete
        return self._status.make(held, size, self._clock(), self._wall_ms())

    def busy(self) -> bool:
        """Never: a relay acts on manifests and ticks."""
        return False

    def close(self) -> None:
        """Stop handing out, and let go of the store; the versions in it stay."""
        if self.heartbeats is not None:
            self.heartbeats.close()
        self._node.close()
        self._store.close()

    def _hear(self, replica: ReplicaStatus) -> None:
        """Note under what a replica generates: those versions are evicted last."""
        if replica.policy_version is None or replica.state == "stopped":
            self._live.pop(replica.replica, None)
        elif self._live.get(replica.replica) != replica.policy_version:
            self._live[replica.replica] = replica.policy_version
            self._store.say_live(set(self._live.values()))

    def _disbelieve(self, manifest: WeightVersion, reason: str) -> list[Output]:
        """Drop the claims that the data plane has found to be lies."""
        claims = self._waiting.get(manifest.version, [])
        lies = [received for received in claims if received.record == manifest]
        self._waiting[manifest.version] = [received for received in claims if received.record != manifest]
        if not self._waiting[manifest.version]:
            del self._waiting[manifest.version]
        return [output for received in lies for output in self._refuse(received, reason)]

    def _judge(self, received: ReceivedRecord) -> list[Output]:
        """Enter a manifest whose version is complete in the store."""
        try:
            reason = contradiction(received.record, self._store.seal(received.record.version))
        except VersionGone:  # evicted by another process just now
            return []
        if reason is not None:
            return self._refuse(received, reason)
        self._held[received.record.version] = received
        return []

    def _refuse(self, received: ReceivedRecord, reason: str) -> list[Output]:
        if received.offset in self._refused:  # read again after a restart
            return []
        self._refused.add(received.offset)
        return [dead_letter(received, "relay", reason, self._wall_ms())]

    def _wall_ms(self) -> int:
        return int(self._wall_s() * 1000)
