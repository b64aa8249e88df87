"""Who gets which work: by credit, so that no replica hoards prompts, and under the newest weights alone.

What has lost its owner goes on where its version is loaded, or on an idle replica, which then loads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from operators.placement.config import PlacementConfig
from operators.placement.leases import Leases
from operators.placement.pool import PooledPartial
from operators.placement.replicas import TrackedReplica
from operators.placement.rounds import Rounds
from operators.placement.tracking import Tracking
from operators.placement.waiting import WaitingWork
from operators.placement.work import Owned, Owner, Work, assignment, under_lease
from schemas.bounds import fits_inbox
from schemas.identity import Purpose
from schemas.records import Assignment, PolicyVersion


class Dispatcher:
    """Gives work to replicas. `admitted` bounds the training work dispatched and not released.

    `is_moving` tells of replicas that give or get trajectories: no fresh work goes there meanwhile.
    """

    def __init__(
        self,
        config: PlacementConfig,
        admitted: int,
        tracking: Tracking,
        waiting: WaitingWork,
        leases: Leases,
        rounds: Rounds,
        is_moving: Callable[[Owner], bool],
        now: Callable[[], int],
    ) -> None:
        self._config, self._rules, self._admitted, self._tracking = config, config.rules, admitted, tracking
        self._waiting, self._leases, self._rounds, self._is_moving = waiting, leases, rounds, is_moving
        self._now = now
        self._emission = 0
        self._awaited: Owner | None = None
        """Who gets nothing fresh, to be free for evaluation: where weights interrupt nobody is so by itself."""

    def dispatch(self, replicas: Sequence[TrackedReplica], emission: int) -> list[Assignment]:
        """Assignments to `replicas`, which run; `emission` is the one that will write them."""
        self._emission = emission
        sent: list[Assignment] = []
        running = [replica for replica in replicas if replica.status.state == "running"]
        if self._has("evaluation"):
            for replica in running:
                sent += self._evaluation(replica)
        self._awaited = self._await(running)
        if self._has("train") and not self._tracking.final:
            if self._tracking.table.lost("train"):
                sent += self._resumed(running)
            if not self.nothing_fresh():
                sent += self._training(running)
        return sent

    def _has(self, purpose: Purpose) -> bool:
        return bool(self._waiting.head(purpose) or self._tracking.table.lost(purpose))

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def _evaluation(self, replica: TrackedReplica) -> list[Assignment]:
        """Evaluation names its version: it goes where that is loaded, or to an idle replica, which then loads it."""
        owner, table, waiting = replica.owner, self._tracking.table, self._waiting
        busy = table.load(owner, "evaluation")
        lost, head = table.lost("evaluation"), waiting.head("evaluation")
        if busy == 0:
            replica.target = None
        if self._is_free(replica) and (lost or head):
            first = lost[0].work if lost else head
            assert first is not None
            replica.target = first.prompt.policy_version
        version = replica.target or replica.status.policy_version
        room = max(0, replica.status.capacity - busy)
        fitting = (owned.work for owned in lost if owned.work.prompt.policy_version == version)
        sent = [self._assign(work, replica) for work, _ in zip(fitting, range(room), strict=False)]
        while len(sent) < room and head is not None and head.prompt.policy_version == version:
            sent.append(self._assign(waiting.pop("evaluation"), replica))
            head = waiting.head("evaluation")
        return sent

    def _await(self, running: Sequence[TrackedReplica]) -> Owner | None:
        """Who is to be free for evaluation next: the same until it is."""
        if self._rules.refresh != "interrupt" or not self._has("evaluation") or any(each.target for each in running):
            return None
        loads = {replica.owner: self._tracking.table.load(replica.owner) for replica in running}
        return self._awaited if self._awaited in loads else min(loads, key=loads.__getitem__, default=None)

    # -- what goes on -------------------------------------------------------------------------------------------------

    def _resumed(self, replicas: Sequence[TrackedReplica]) -> list[Assignment]:
        """What was lost with some tokens goes on under its version: where that is loaded, or where nothing runs."""
        if self._rules.refresh == "interrupt":
            return []  # it goes on under any version, as fresh work does
        partials = [(owned.work, self._partial(owned.work)) for owned in self._tracking.table.lost("train")]
        by_version: dict[PolicyVersion, list[Work]] = {}
        for work, partial in partials:
            if partial is not None and partial.version is not None:
                by_version.setdefault(partial.version, []).append(work)
        sent: list[Assignment] = []
        for replica in replicas if by_version else ():
            loaded = replica.version
            if loaded in by_version and not self._is_moving(replica.owner):
                sent += self._resume(replica, loaded, by_version)
        for replica in replicas if by_version else ():
            if self._is_free(replica):
                replica.resumed = next(iter(by_version), None)
                if replica.resumed is not None:
                    sent += self._resume(replica, replica.resumed, by_version)
        return sent

    def _resume(
        self, replica: TrackedReplica, version: PolicyVersion, by_version: dict[PolicyVersion, list[Work]]
    ) -> list[Assignment]:
        left = by_version[version]
        here = [left.pop(0) for _ in range(min(len(left), self._room(replica)))]
        if not left:
            del by_version[version]
        return [self._assign(work, replica) for work in here]

    # -- what is fresh ------------------------------------------------------------------------------------------------

    def _training(self, replicas: Sequence[TrackedReplica]) -> list[Assignment]:
        """Fresh work, each group to whoever has least and its rest to the next: all replicas begin alike."""
        takers = []
        for replica in replicas:
            room = self._room_for_fresh(replica)
            if room > 0:
                takers.append((self._tracking.table.load(replica.owner), replica.status.replica, replica, room))
        heapify(takers)
        interrupts = self._rules.refresh == "interrupt"
        lost = self._tracking.table.lost("train") if takers else []
        fresh = deque(owned.work for owned in lost if interrupts or self._partial(owned.work) is None)
        sent: list[Assignment] = []
        while takers:
            load, index, replica, room = heappop(takers)
            again = self._afresh(fresh, replica)
            here = self._group(replica, room) if again is None else [self._assign(again, replica)]
            if not here:
                break
            replica.sent += len(here)
            if len(here) < room:
                heappush(takers, (load + len(here), index, replica, room - len(here)))
            sent += here
        return sent

    def _afresh(self, fresh: deque[Work], replica: TrackedReplica) -> Work | None:
        """The first of what starts afresh that may do so here.

        One whose last start it is shares its replica with no other such: what crashes engines is to end alone.
        """
        last = self._config.max_attempts
        for work in fresh:
            if 1 <= work.attempt == last - 1:
                others = self._tracking.table.at(replica.owner)
                if any(owned.work.attempt >= last for owned in others):
                    continue
            fresh.remove(work)
            return work
        return None

    def _room_for_fresh(self, replica: TrackedReplica) -> int:
        """Room under the newest version only: what was announced since is taken between two batches."""
        table, owner = self._tracking.table, replica.owner
        if table.load(owner) == 0:
            replica.target = replica.resumed = None
        version, newest, interrupts = replica.version, self._tracking.newest, self._rules.refresh == "interrupt"
        if version is None or newest is None or (version < newest and not interrupts) or self._is_moving(owner):
            return 0
        if owner == self._awaited:
            return 0
        room = self._room(replica)
        if self._rules.refresh == "drain":
            room = min(room, replica.quota(table.load(owner, "train"), self._config.replica_batch))
        return room

    def _group(self, replica: TrackedReplica, room: int) -> list[Assignment]:
        """What waits of the next group, if it may begin: members of one place compute their prompt once."""
        sent: list[Assignment] = []
        first = self._waiting.head("train")
        if first is None or not self._admits(first):
            return sent
        work: Work | None = first
        while work is not None and len(sent) < room and work.prompt is first.prompt:
            self._rounds.count()
            sent.append(self._assign(self._waiting.pop("train"), replica))
            work = self._waiting.head("train")
        return sent

    def nothing_fresh(self) -> bool:
        """Whether no replica, whatever its room, would get anything fresh."""
        head = self._waiting.head("train")
        return not self._tracking.table.lost("train") and (head is None or not self._admits(head))

    def _admits(self, work: Work) -> bool:
        """Whether `work` may begin.

        A group is admitted whole, and as long as there is any room: what is settled is whole groups that make up a
        batch at least, so a bound that they fill only in part must not stop the next one for good.
        """
        if work.member:
            return True
        table = self._tracking.table
        room = self._admitted - table.training()
        return room > 0 and (self._rules.refresh != "boundary" or self._rounds.admits(table.under_way(), room))

    def _room(self, replica: TrackedReplica) -> int:
        """How many more trajectories it may have: its batch, or what runs at once by the lengths seen, and a few."""
        status, table, config = replica.status, self._tracking.table, self._config
        load = table.load(replica.owner) + table.expected(replica.owner)
        training = load - table.load(replica.owner, "evaluation")
        if config.prefetch is None:
            return max(0, max(status.capacity, config.replica_batch or 0) - training)
        room = status.capacity - training
        each = self._tracking.lengths.kv()
        if each and status.kv_capacity:
            room = min(room, max(int(status.kv_capacity / each), 1) - load)
        return max(0, room + config.prefetch)

    def _is_free(self, replica: TrackedReplica) -> bool:
        table, owner = self._tracking.table, replica.owner
        return table.load(owner) == 0 and not table.expected(owner) and not self._is_moving(owner)

    def _partial(self, work: Work) -> PooledPartial | None:
        return self._tracking.pool.get(work.trajectory_id)

    def _assign(self, work: Work, replica: TrackedReplica) -> Assignment:
        tracking, owner = self._tracking, replica.owner
        name = work.trajectory_id
        gained = tracking.pool.gained(name)
        partial = self._partial(work)
        if partial is not None and not fits_inbox(work.prompt, len(partial)):
            partial, gained = None, False
            tracking.pool.begin(name, work.lease, None)
        owned = Owned(under_lease(work, self._leases.mint(), gained), owner.replica, owner.incarnation, self._emission)
        tracking.assign(owned)
        pinned = partial is not None and self._rules.refresh != "interrupt"
        return assignment(owned, partial, partial.version if pinned and partial else None, self._now())
