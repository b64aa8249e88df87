"""Who gets which work: by credit, so that no replica hoards prompts, and under the newest weights alone."""

from __future__ import annotations

from operators.placement.config import PlacementConfig
from operators.placement.replicas import Replica
from operators.placement.waiting import WaitingWork
from operators.placement.work import Owned, Owner, Work, WorkTable, under_lease
from schemas.records import PolicyVersion


class Dispatcher:
    """Mints leases, of which `lease` is the last. `admitted` bounds the training work dispatched and not released."""

    def __init__(
        self, config: PlacementConfig, admitted: int, table: WorkTable, waiting: WaitingWork, lease: int
    ) -> None:
        self._config, self._admitted, self._table, self._waiting = config, admitted, table, waiting
        self.lease = lease

    def evaluation(self, replica: Replica, emission: int) -> list[Owned]:
        """Evaluation names its version: it goes where that is loaded, or to an idle replica, which then loads it."""
        owner = _owner(replica)
        busy = self._table.load(owner, "evaluation")
        lost, head = self._table.lost("evaluation"), self._waiting.head("evaluation")
        if busy == 0:
            replica.target = None
        if self._table.load(owner) == 0 and (lost or head):
            first = lost[0].work if lost else head
            assert first is not None
            replica.target = first.prompt.policy_version
        version = replica.target or replica.status.policy_version
        room = max(0, replica.status.capacity - busy)
        fitting = (owned.work for owned in lost if owned.work.prompt.policy_version == version)
        sent = [self._assign(work, owner, emission) for work, _ in zip(fitting, range(room), strict=False)]
        while len(sent) < room and head is not None and head.prompt.policy_version == version:
            sent.append(self._assign(self._waiting.pop("evaluation"), owner, emission))
            head = self._waiting.head("evaluation")
        return sent

    def training(self, replica: Replica, newest: PolicyVersion | None, emission: int) -> list[Owned]:
        """Fresh work, under the `newest` version only: what was announced since is taken between two batches."""
        status, config, owner = replica.status, self._config, _owner(replica)
        version, load = status.policy_version, self._table.load(owner, "train")
        if replica.target not in (None, version) or version is None or newest is None or version < newest:
            return []
        room = max(0, min(status.capacity + config.prefetch - load, replica.quota(load, config.replica_batch)))
        lost = self._table.lost("train")[:room]
        sent = [self._assign(owned.work, owner, emission) for owned in lost]
        while len(sent) < room and (work := self._waiting.head("train")) is not None:
            # A group is admitted whole, and as long as there is any room: what is settled is whole groups that make up
            # a batch at least, so a bound that they fill only in part must not stop the next one for good.
            if work.member == 0 and self._table.training() >= self._admitted:
                break
            sent.append(self._assign(self._waiting.pop("train"), owner, emission))
        replica.sent += len(sent)
        return sent

    def _assign(self, work: Work, owner: Owner, emission: int) -> Owned:
        self.lease += 1
        owned = Owned(under_lease(work, self.lease), owner.replica, owner.incarnation, emission)
        self._table.assign(owned)
        return owned


def _owner(replica: Replica) -> Owner:
    return Owner(replica.status.replica, replica.status.incarnation)
