"""Assigns work to replicas: fresh work by credit, so that no replica hoards prompts, to begin under the newest weights.

Trajectories that lost their owner resume where their version is loaded, or on an idle replica, which then loads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from operators.io.partial_pool import PooledPartial
from operators.io.repartition import Placed, PlacementReason
from operators.placement.config import PlacementConfig
from operators.placement.replicas import TrackedReplica
from operators.placement.tracking import TrajectoryTracker
from operators.placement.waiting_work import WaitingWork
from operators.placement.work_table import Leases, Owned, Owner, Work
from schemas.bounds import fits_inbox
from schemas.identity import Purpose
from schemas.records import Assignment, PolicyVersion
from schemas.records.relays import MAX_NEEDED_VERSIONS


class Dispatcher:
    """Assigns work to replicas. `admitted` bounds the training trajectories dispatched and not released.

    `is_moving(owner)` is True for the source or destination of a move; it gets no fresh work meanwhile. While
    `is_paused()`, no waiting work is assigned; lost trajectories still resume.

    A replica has one version at a time, so evaluation of an older version takes turns with training, while training has
    work that waits: a replica answers as many questions as it has slots, drains, trains its batch under the newest
    version, and drains again. Neither stops the other.
    """

    def __init__(
        self,
        config: PlacementConfig,
        admitted: int,
        tracking: TrajectoryTracker,
        waiting: WaitingWork,
        leases: Leases,
        rounds: Rounds,
        is_moving: Callable[[Owner], bool],
        now: Callable[[], int],
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config, self._rules, self._admitted, self._tracking = config, config.rules, admitted, tracking
        self._waiting, self._leases, self._rounds, self._is_moving = waiting, leases, rounds, is_moving
        self._now, self._is_paused = now, is_paused
        self._emission = 0
        self._training_waits = False
        """Whether there was training work to assign when this emission began."""
        self._alone = False
        """Whether there is one replica only, which gets its next batch early: no other could begin it sooner."""
        self._draining: Owner | None = None
        """The replica that gets no fresh work, so that it becomes free for older weights. Needed only where newer ones
        do not wait until a replica has drained."""

    def dispatch(self, replicas: Sequence[TrackedReplica], emission: int) -> list[Placed]:
        """Decisions for `replicas`, which are alive; emission number `emission` will write them."""
        self._emission = emission
        sent: list[Placed] = []
        running = [replica for replica in replicas if replica.status.state == "running"]
        self._training_waits = not self._tracking.final and not self.has_no_fresh_work()
        self._alone = len(replicas) == 1
        for replica in running:
            self._end_pins(replica)
        if self._has("evaluation"):
            for replica in running:
                sent += self._dispatch_evaluation(replica)
        self._draining = self._drain_for_evaluation(running) or self._drain_for_lost(running)
        if self._has("train") and not self._tracking.final:
            if self._tracking.table.lost("train"):
                sent += self._resume_lost(running)
            if not self.has_no_fresh_work():
                sent += self._dispatch_fresh(running)
        return sent

    def _head(self, purpose: Purpose) -> Work | None:
        """The next work that may begin, regardless of room."""
        return None if self._is_paused() else self._waiting.head(purpose)

    def _has(self, purpose: Purpose) -> bool:
        return bool(self._head(purpose) or self._tracking.table.lost(purpose))

    def _end_pins(self, replica: TrackedReplica) -> None:
        """Clear the version of a replica's questions, and of trajectories that it resumed, once none of them is left.

        A replica that loads newer weights without becoming empty may have other work at all times.
        """
        table, owner = self._tracking.table, replica.owner
        if not table.load(owner, "evaluation"):
            replica.end_evaluation()
        if replica.resumed is not None:
            partials = (self._partial(owned.work) for owned in table.owned_by(owner))
            if not any(each is not None and each.version == replica.resumed for each in partials):
                replica.resumed = None

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def _dispatch_evaluation(self, replica: TrackedReplica) -> list[Placed]:
        """Evaluation work names its version: it runs where that is loaded, or on an idle replica, which loads it."""
        table, waiting = self._tracking.table, self._waiting
        lost, head = table.lost("evaluation"), self._head("evaluation")
        first = self._first_question()
        if first is not None and self._is_free(replica) and self._evaluation_room(replica, first.prompt.policy_version):
            replica.target = first.prompt.policy_version
        version = replica.target or replica.status.policy_version
        room = self._evaluation_room(replica, version)
        fitting = (owned.work for owned in lost if owned.work.prompt.policy_version == version)
        sent = [self._assign(work, replica) for work, _ in zip(fitting, range(room), strict=False)]
        while len(sent) < room and head is not None and head.prompt.policy_version == version:
            sent.append(self._assign(waiting.pop("evaluation"), replica))
            head = self._head("evaluation")
        return sent

    def _first_question(self) -> Work | None:
        """The next evaluation work: lost work comes first."""
        lost = self._tracking.table.lost("evaluation")
        return lost[0].work if lost else self._head("evaluation")

    def _evaluation_room(self, replica: TrackedReplica, version: PolicyVersion | None) -> int:
        """How many questions under `version` it may get: those of its turn, if training waits for other weights."""
        capacity, newest = replica.status.capacity, self._tracking.newest
        room = max(0, capacity - self._tracking.table.load(replica.owner, "evaluation"))
        if not self._training_waits or version is None or newest is None or version >= newest:
            return room
        return 0 if replica.training_next else min(room, max(0, capacity - replica.asked))

    def needed_versions(self, replicas: Sequence[TrackedReplica]) -> tuple[PolicyVersion, ...]:
        """The versions of evaluation work that waits or is with a replica, in the order in which they are needed."""
        lost = (owned.work.prompt.policy_version for owned in self._tracking.table.lost("evaluation"))
        targets = (replica.target for replica in replicas if self._tracking.table.load(replica.owner, "evaluation"))
        versions = dict.fromkeys((*targets, *lost, *self._waiting.versions()))
        return tuple(each for each in versions if each is not None)[:MAX_NEEDED_VERSIONS]

    def _drain_for_evaluation(self, running: Sequence[TrackedReplica]) -> Owner | None:
        """The replica to drain for evaluation; it stays the same until it is free."""
        if not self._rules.refreshes_at_once or not self._has("evaluation") or any(each.target for each in running):
            return None
        first = self._first_question()
        version = None if first is None else first.prompt.policy_version
        if self._rules.refresh == "slot" and _is_reachable(version, running):
            return None
        return self._least_loaded([each for each in running if not (each.training_next and self._training_waits)])

    def _drain_for_lost(self, running: Sequence[TrackedReplica]) -> Owner | None:
        """The replica to drain for lost trajectories with tokens under a version that no replica has or will reach.

        Only where replicas with two versions are never free by themselves.
        """
        if self._rules.refresh != "slot":
            return None
        partials = [self._partial(owned.work) for owned in self._tracking.table.lost("train")]
        waiting = {each.version for each in partials if each is not None and each.version is not None}
        return None if all(_is_reachable(version, running) for version in waiting) else self._least_loaded(running)

    def _least_loaded(self, replicas: Sequence[TrackedReplica]) -> Owner | None:
        """The one of `replicas` that drains already, else the one with the least work."""
        loads = {replica.owner: self._tracking.table.load(replica.owner) for replica in replicas}
        return self._draining if self._draining in loads else min(loads, key=loads.__getitem__, default=None)

    # -- lost trajectories --------------------------------------------------------------------------------------------

    def _resume_lost(self, replicas: Sequence[TrackedReplica]) -> list[Placed]:
        """Resume lost trajectories that have tokens under their version: where it is loaded, or on a free replica."""
        if self._rules.refresh == "interrupt":
            return []  # they resume under any version, with the fresh work
        partials = [(owned.work, self._partial(owned.work)) for owned in self._tracking.table.lost("train")]
        by_version: dict[PolicyVersion, list[Work]] = {}
        for work, partial in partials:
            if partial is not None and partial.version is not None:
                by_version.setdefault(partial.version, []).append(work)
        sent: list[Placed] = []
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
    ) -> list[Placed]:
        left = by_version[version]
        here = [left.pop(0) for _ in range(min(len(left), self._room(replica)))]
        if not left:
            del by_version[version]
        return [self._assign(work, replica) for work in here]

    # -- fresh work ----------------------------------------------------------------------------------------------------

    def _dispatch_fresh(self, replicas: Sequence[TrackedReplica]) -> list[Placed]:
        """Assign fresh work: each group to the least loaded replica and its rest to the next, so loads are equal."""
        takers = []
        for replica in replicas:
            room = self._room_for_fresh(replica)
            if room > 0:
                takers.append((self._tracking.table.load(replica.owner), replica.status.replica, replica, room))
        heapify(takers)
        interrupts = self._rules.refresh == "interrupt"
        lost = self._tracking.table.lost("train") if takers else []
        fresh = deque(owned.work for owned in lost if interrupts or self._partial(owned.work) is None)
        sent: list[Placed] = []
        while takers:
            load, index, replica, room = heappop(takers)
            restarted = self._pop_restart(fresh, replica)
            here = self._assign_group(replica, room) if restarted is None else [self._assign(restarted, replica)]
            if not here:
                if not fresh:
                    break
                continue  # no group may begin, but another replica may take a trajectory at its last attempt
            replica.count_sent(len(here), self._tracking.newest)
            if len(here) < room:
                heappush(takers, (load + len(here), index, replica, room - len(here)))
            sent += here
        return sent

    def _pop_restart(self, fresh: deque[Work], replica: TrackedReplica) -> Work | None:
        """The first lost trajectory that may start afresh on `replica`.

        A replica gets at most one trajectory at its last attempt: suspected poison prompts are isolated, so that one
        which crashes engines does not take another with it.
        """
        last = self._config.max_attempts
        for work in fresh:
            if 1 <= work.attempt == last - 1:
                others = self._tracking.table.owned_by(replica.owner)
                if any(owned.work.attempt >= last for owned in others):
                    continue
            fresh.remove(work)
            return work
        return None

    def _room_for_fresh(self, replica: TrackedReplica) -> int:
        """Room for fresh work: under the newest version only. A replica that has to take newer weights first gets none,
        unless it is alone.
        """
        table, owner = self._tracking.table, replica.owner
        version, newest = replica.version, self._tracking.newest
        if version is None or newest is None or self._is_moving(owner) or owner == self._draining:
            return 0
        if version < newest and not self._rules.refreshes_at_once:
            return self._room_ahead(replica)
        if self._rules.refresh != "drain":
            return self._room(replica)
        quota = replica.quota(table.load(owner, "train"), self._config.replica_batch)
        return min(self._room(replica), quota) if quota > 0 else 0

    def _room_ahead(self, replica: TrackedReplica) -> int:
        """Room for a batch that the only replica starts once it is empty, under the newest weights.

        So it does not wait for a decision between two batches. None while work of other versions needs it to become
        free: evaluation, and lost trajectories with tokens.
        """
        if not self._alone or self._rules.refresh != "drain" or replica.target or replica.resumed:
            return 0
        lost = self._tracking.table.lost("train")
        if self._has("evaluation") or any(self._partial(owned.work) is not None for owned in lost):
            return 0
        batch = self._config.replica_batch or replica.status.capacity
        return min(replica.quota_ahead(batch), 2 * batch - self._tracking.table.load(replica.owner))

    def _assign_group(self, replica: TrackedReplica, room: int) -> list[Placed]:
        """Assign up to `room` members of the next group; members on one replica share the prefill of their prompt."""
        sent: list[Placed] = []
        first = self._head("train")
        if first is None or not self._admits(first):
            return sent
        work: Work | None = first
        while work is not None and len(sent) < room and work.prompt is first.prompt:
            self._rounds.count()
            sent.append(self._assign(self._waiting.pop("train"), replica))
            work = self._head("train")
        return sent

    def has_no_fresh_work(self) -> bool:
        """Whether there is no fresh work to assign, regardless of room."""
        head = self._head("train")
        return not self._tracking.table.lost("train") and (head is None or not self._admits(head))

    def waiting(self) -> int:
        """Training trajectories that may begin or resume now, and for which no replica has room."""
        head, table = self._head("train"), self._tracking.table
        lost = 0 if self._is_paused() else len(table.lost("train"))
        if self._tracking.final or head is None or not self._admits(head):
            return lost
        room = max(0, self._admitted - table.outstanding_training)
        if self._rules.refresh == "boundary":
            room = min(room, self._rounds.left)
        return lost + min(self._waiting.count("train"), self._waiting.rest_of_begun() + room)

    def _admits(self, work: Work) -> bool:
        """Whether `work` may begin.

        A group is admitted whole, while there is any room. Groups are settled in batches, so a bound that whole groups
        fill only in part would otherwise block the next group for ever.
        """
        if work.member:
            return True
        table = self._tracking.table
        room = self._admitted - table.outstanding_training
        return room > 0 and (self._rules.refresh != "boundary" or self._rounds.admits(table.unfinished_training, room))

    def _room(self, replica: TrackedReplica) -> int:
        """How many more trajectories a replica may hold: its batch, or with `prefetch` what runs at once plus that."""
        status, table, config = replica.status, self._tracking.table, self._config
        load = table.load(replica.owner) + table.incoming(replica.owner)
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
        return table.load(owner) == 0 and not table.incoming(owner) and not self._is_moving(owner)

    def _partial(self, work: Work) -> PooledPartial | None:
        return self._tracking.pool.get(work.trajectory_id)

    def _assign(self, work: Work, replica: TrackedReplica) -> Placed:
        tracking, owner = self._tracking, replica.owner
        name = work.trajectory_id
        gained = tracking.pool.gained(name)
        partial = self._partial(work)
        if partial is not None and not fits_inbox(work.prompt, len(partial)):
            partial, gained = None, False
            tracking.pool.start_lease(name, work.lease, None)
        lease = self._leases.mint()
        # Only starts that produced no tokens count as attempts.
        leased = replace(work, lease=lease, attempt=work.attempt + (not gained))
        owned = Owned(leased, owner.replica, owner.incarnation, self._emission)
        tracking.assign(owned)
        replica.count(work.prompt.purpose)
        interrupts = self._rules.refresh == "interrupt"
        named = work.prompt.policy_version or (None if partial is None or interrupts else partial.version)
        newest = None if self._rules.refresh == "slot" else tracking.newest  # it begins under the weights that it finds
        versions = [each for each in (replica.version, newest) if each is not None]
        assignment = Assignment(
            prompt=work.prompt,
            member=work.member,
            lease=lease,
            attempt=owned.work.attempt,
            replica=owner.replica,
            incarnation=owner.incarnation,
            policy_version=named,
            partial=None if partial is None else partial.response,
            assigned_at=self._now(),
            version_spans=() if partial is None else partial.version_spans,
            # It may have older weights still, or have loaded them for evaluation after its last heartbeat.
            at_least=None if interrupts or named is not None else max(versions, default=None),
        )
        return Placed(assignment, _reason(work, partial))


def _is_reachable(version: PolicyVersion | None, replicas: Sequence[TrackedReplica]) -> bool:
    """Whether one of `replicas` has `version`, or may still reach it."""
    return version is not None and any(each.version is None or each.version <= version for each in replicas)


def _reason(work: Work, partial: PooledPartial | None) -> PlacementReason:
    """Why `work`, before its new lease, gets an owner."""
    if not work.lease:
        return "dispatch"
    return "failover" if partial is None else "resume"


class Rounds:
    """Under a schedule with a global boundary, a round begins once the previous one is generated completely.

    Counts the trajectories that the present round may still begin (`left`), of `size` in a round.
    """

    def __init__(self, size: int, left: int = 0) -> None:
        self._size = size
        self.left = left

    def admits(self, unfinished: int, room: int) -> bool:
        """Whether another group may begin, with `unfinished` trajectories and `room` below the bound."""
        if unfinished == 0:
            self.left = min(self._size, room)
        return self.left > 0

    def count(self) -> None:
        """Count a trajectory that begins."""
        self.left -= 1
