"""The replicas as placement tracks them: last heartbeats, by its own clock, and the work assigned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from operators.io.validation import MAX_STARTS_APART
from operators.placement.work_table import Owner
from schemas.identity import Purpose
from schemas.records import PolicyVersion, ReplicaStatus

MAX_FIRST_INCARNATION = 10**6
"""Of a replica of which nothing is known yet: its process has not started more often than that."""


@dataclass(slots=True)
class TrackedReplica:
    """One replica. `last_heartbeat_at` is the receipt time in monotonic seconds.

    `sent` counts training assignments under `sent_version`; `ahead` those that were sent while it had version
    `ahead_of`, to start under a newer one. `target` is the version that its evaluation work makes it load, and
    `resumed` that of resumed trajectories. `asked` counts the evaluation assignments since it last had none;
    `training_next` is set once they have finished, until it gets training work. `kv_before` is its KV use when moves
    were last planned.
    """

    status: ReplicaStatus
    last_heartbeat_at: float
    sent: int = 0
    sent_version: PolicyVersion | None = None
    ahead: int = 0
    ahead_of: PolicyVersion | None = None
    target: PolicyVersion | None = None
    asked: int = 0
    training_next: bool = False
    resumed: PolicyVersion | None = None
    kv_before: int | None = None
    gone: bool = False
    owner: Owner = field(init=False)

    def __post_init__(self) -> None:
        self.owner = Owner(self.status.replica, self.status.incarnation)

    @property
    def version(self) -> PolicyVersion | None:
        """The loaded version; None if the replica's work makes it load another."""
        loaded = self.status.policy_version
        return loaded if self.target in (None, loaded) and self.resumed in (None, loaded) else None

    def end_evaluation(self) -> None:
        """Record that it has no evaluation work."""
        self.training_next |= self.asked > 0
        self.target, self.asked = None, 0

    def count(self, purpose: Purpose) -> None:
        """Count an assignment."""
        if purpose == "evaluation":
            self.asked += 1
        else:
            self.training_next = False

    def quota(self, load: int, replica_batch: int | None) -> int:
        """Training assignments it may still get under its version; a drained replica begins a new batch.

        Work that it holds when its version is first reported counts: it was sent before a restart, or during the load.
        """
        if load == 0 or self.sent_version != self.status.policy_version:
            self.sent, self.sent_version = load, self.status.policy_version
        return (replica_batch or self.status.capacity) - self.sent

    def quota_ahead(self, batch: int) -> int:
        """Training assignments of the next `batch` that it may still get while it has its present version."""
        if self.ahead_of != self.status.policy_version:
            self.ahead, self.ahead_of = 0, self.status.policy_version
        return batch - self.ahead

    def count_sent(self, assignments: int, newest: PolicyVersion | None) -> None:
        """Count fresh training assignments, which start under `newest`."""
        self.sent += assignments
        if newest != self.status.policy_version:
            self.ahead += assignments


class ReplicaTable:
    """Replicas by index. Each has at most one live incarnation, the highest one reported.

    One that is far above the highest known of a replica is of another program: the real process could beat no more.
    """

    def __init__(self) -> None:
        self._replicas: dict[int, TrackedReplica] = {}
        self._fenced: dict[int, int] = {}

    def record_heartbeat(self, status: ReplicaStatus, now: float) -> str | None:
        """Record a heartbeat; those of older incarnations are ignored. Returns why it is rejected, or None."""
        fenced, known = self._fenced.get(status.replica, -1), self._replicas.get(status.replica)
        highest = max(fenced, -1 if known is None else known.status.incarnation)
        if status.incarnation > (MAX_FIRST_INCARNATION if highest < 0 else highest + MAX_STARTS_APART):
            return f"incarnation {status.incarnation} of replica {status.replica} is far ahead of the last, {highest}"
        if status.incarnation <= fenced or status.incarnation < highest:
            return None  # fenced, maybe before its first heartbeat, or followed by another
        if known is None or status.incarnation > known.status.incarnation:
            self._replicas[status.replica] = known = TrackedReplica(status, now)
        elif known.gone:
            return None  # it has stopped, or is fenced: its work is assigned to others
        known.status, known.last_heartbeat_at = status, now
        known.gone = status.state == "stopped"
        return None

    def alive(self) -> list[TrackedReplica]:
        """Live replicas, by index."""
        return [replica for _, replica in sorted(self._replicas.items()) if not replica.gone]

    def incarnation(self, replica: int) -> int | None:
        """The live incarnation of `replica`; None if there is none."""
        known = self._replicas.get(replica)
        return None if known is None or known.gone else known.status.incarnation

    def version(self, replica: int) -> PolicyVersion | None:
        """The version that the live incarnation of `replica` reports; None if there is none."""
        known = self._replicas.get(replica)
        return None if known is None or known.gone else known.status.policy_version

    def find(self, owner: Owner) -> TrackedReplica | None:
        """The replica in this incarnation; None if that has ended."""
        return self._replicas[owner.replica] if self.is_alive(owner) else None

    def is_alive(self, owner: Owner) -> bool:
        """Whether this incarnation of a replica is alive."""
        return self.incarnation(owner.replica) == owner.incarnation

    def is_known(self, owner: Owner) -> bool:
        """Whether this incarnation, or a later one, has sent a heartbeat in this start, or was fenced."""
        known = self._replicas.get(owner.replica)
        latest = -1 if known is None else known.status.incarnation
        return owner.incarnation <= max(latest, self._fenced.get(owner.replica, -1))

    def can_fetch(self, destination: Owner, source: Owner) -> bool:
        """Whether `destination` does not report that it cannot connect to `source`, which has the KV."""
        to, of = self.find(destination), self.find(source)
        return to is None or of is None or of.status.kv_address not in to.status.unreachable

    def has_ended(self, owner: Owner) -> bool:
        """Whether this incarnation is known to have ended; one without a heartbeat yet may be alive."""
        return self.is_known(owner) and not self.is_alive(owner)

    def has_crashed(self, owner: Owner) -> bool:
        """Whether this incarnation, which has ended, has not just lost its session: then its process has begun the
        present one, too."""
        known = self._replicas.get(owner.replica)
        if known is None or known.status.incarnation <= owner.incarnation:
            return True
        return not 0 < known.status.first_incarnation <= owner.incarnation

    def mark_fenced(self, owners: Iterable[Owner]) -> None:
        """Record that these incarnations are fenced, and so have ended."""
        for replica, incarnation in owners:
            self._fenced[replica] = max(incarnation, self._fenced.get(replica, -1))
            if (known := self._replicas.get(replica)) is not None and known.status.incarnation <= incarnation:
                known.gone = True

    def timed_out(self, now: float, timeout: float) -> list[Owner]:
        """Live replicas without a heartbeat for longer than `timeout` seconds."""
        return [replica.owner for replica in self.alive() if now - replica.last_heartbeat_at > timeout]

    def reset_timeouts(self, now: float) -> None:
        """Restart all time-outs, since placement itself was paused."""
        for replica in self._replicas.values():
            replica.last_heartbeat_at = now
