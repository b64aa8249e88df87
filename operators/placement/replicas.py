"""What placement knows of replicas: their last heartbeats, by its own clock, and what it has sent them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from operators.placement.work import Owner
from schemas.records import PolicyVersion, ReplicaStatus


@dataclass(slots=True)
class TrackedReplica:
    """One replica. `heard_at` is monotonic seconds at receipt; `sent` counts training assignments under `sent_under`.

    `target` is the version that evaluation work makes it load, `resumed` that of trajectories that go on in it, while
    it has such work. `kv_before` is its KV use when moves were last planned.
    """

    status: ReplicaStatus
    heard_at: float
    sent: int = 0
    sent_under: PolicyVersion | None = None
    target: PolicyVersion | None = None
    resumed: PolicyVersion | None = None
    kv_before: int | None = None
    gone: bool = False

    @property
    def owner(self) -> Owner:
        return Owner(self.status.replica, self.status.incarnation)

    @property
    def version(self) -> PolicyVersion | None:
        """The version that it has loaded, and is to keep while it has what it has."""
        loaded = self.status.policy_version
        return loaded if self.target in (None, loaded) and self.resumed in (None, loaded) else None

    def quota(self, load: int, replica_batch: int | None) -> int:
        """Training assignments it may still get under its version; a drained replica begins a new batch.

        What it has when its version is first seen counts: it was sent before a restart, or while it loaded.
        """
        if load == 0 or self.sent_under != self.status.policy_version:
            self.sent, self.sent_under = load, self.status.policy_version
        return (replica_batch or self.status.capacity) - self.sent


class ReplicaTable:
    """Replicas by index; each has one live incarnation at most, the highest one heard of."""

    def __init__(self) -> None:
        self._replicas: dict[int, TrackedReplica] = {}
        self._presumed_gone: dict[int, int] = {}

    def hear(self, status: ReplicaStatus, now: float) -> None:
        """Take in a heartbeat; those of older incarnations are ignored."""
        if status.incarnation <= self._presumed_gone.get(status.replica, -1):
            return  # fenced unheard
        known = self._replicas.get(status.replica)
        if known is not None and status.incarnation < known.status.incarnation:
            return
        if known is None or status.incarnation > known.status.incarnation:
            self._replicas[status.replica] = known = TrackedReplica(status, now)
        elif known.gone:
            return  # fenced: whatever it still says, its work is with others
        known.status, known.heard_at = status, now
        known.gone = status.state == "stopped"

    def alive(self) -> list[TrackedReplica]:
        """Replicas that are up, in order of index."""
        return [replica for _, replica in sorted(self._replicas.items()) if not replica.gone]

    def incarnation(self, replica: int) -> int | None:
        """The live incarnation of `replica`; None if there is none."""
        known = self._replicas.get(replica)
        return None if known is None or known.gone else known.status.incarnation

    def find(self, owner: Owner) -> TrackedReplica | None:
        """The replica in this life; None if it is over."""
        return self._replicas[owner.replica] if self.is_alive(owner) else None

    def is_alive(self, owner: Owner) -> bool:
        """Whether this life of a replica goes on."""
        return self.incarnation(owner.replica) == owner.incarnation

    def heard_of(self, owner: Owner) -> bool:
        """Whether this life of a replica, or a later one, was heard of in this start, or is presumed to be gone."""
        known = self._replicas.get(owner.replica)
        latest = -1 if known is None else known.status.incarnation
        return owner.incarnation <= max(latest, self._presumed_gone.get(owner.replica, -1))

    def is_over(self, owner: Owner) -> bool:
        """Whether this life of a replica is known to have ended; one that was not heard of yet may go on."""
        return self.heard_of(owner) and not self.is_alive(owner)

    def presume_gone(self, owners: Iterable[Owner]) -> None:
        """These lives of replicas, never heard of, are over."""
        for replica, incarnation in owners:
            self._presumed_gone[replica] = max(incarnation, self._presumed_gone.get(replica, -1))
            if (known := self._replicas.get(replica)) is not None and known.status.incarnation <= incarnation:
                known.gone = True

    def silent(self, now: float, timeout: float) -> list[Owner]:
        """Replicas not heard of for longer than `timeout` seconds."""
        return [replica.owner for replica in self.alive() if now - replica.heard_at > timeout]

    def forgive(self, now: float) -> None:
        """Start every time-out anew: it was placement itself that paused."""
        for replica in self._replicas.values():
            replica.heard_at = now
