"""PlaceTrajectories: the rollout manager. It alone mints leases and decides where each trajectory runs.

A restart rebuilds the table of work from what placement wrote (assignments in the inbox), what replicas wrote
(trajectories) and what was settled; it decides nothing before it has seen all that had been written when it started.
Between topics there is no order: a trajectory may be settled here before it has finished here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from infra.kafka.fencing import fence
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Output, Place, Polled, Received, Restored
from operators.io.ledger import TrajectoryLedger
from operators.io.pending import PendingOffsets
from operators.placement.config import PlacementConfig
from operators.placement.coverage import Coverage
from operators.placement.dispatch import Dispatcher
from operators.placement.ending import failed_trajectory
from operators.placement.holds import Holds
from operators.placement.replicas import ReplicaTable
from operators.placement.waiting import WaitingWork
from operators.placement.work import Owned, Owner, Work, WorkTable, assignment
from schemas.identity import TrajectoryKey, parse_trajectory_id
from schemas.records import (
    Assignment,
    Cancel,
    PolicyVersion,
    Prompt,
    Refused,
    ReplicaStatus,
    Settled,
    Trajectory,
    WeightVersion,
)
from schemas.topics import INBOX, SETTLED, TRAJECTORIES, group_name, partition_of


@dataclass(frozen=True)
class PlaceTrajectories:
    """`admitted` bounds the training trajectories dispatched and not settled: (max_staleness + 1) × global batch.

    The group that crosses the bound is still admitted. A rollout process hosts `hosted` replicas, those of process 0
    first.
    """

    config: PlacementConfig
    shard: ShardConfig
    partitions: int
    admitted: int
    hosted: int = 1

    def restore(self, restored: Restored) -> _Placing:
        return _Placing(self, restored, self._fence)

    def _fence(self, process: int) -> None:
        fence(self.shard.client, group_name(self.shard.run, "rollout", process))


class _Placing:
    def __init__(
        self,
        step: PlaceTrajectories,
        restored: Restored,
        fence_process: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = lambda: time.time_ns() // 10**6,
    ) -> None:
        self._step, self._fence, self._clock, self._now = step, fence_process, clock, now
        self._released = TrajectoryLedger(step.partitions, restored.marks.get("released"))
        self._table = WorkTable()
        self._replicas = ReplicaTable()
        self._pending = PendingOffsets()
        self._waiting = WaitingWork(self._pending, self._is_known)
        self._coverage = Coverage()
        self._finished = Holds(self._pending)  # until they are settled
        self._refused = Holds(
            self._pending
        )  # until they are assigned again: the inbox says that their owners have them
        self._cancels: dict[Owner, list[str]] = {}
        self._newest: PolicyVersion | None = None
        self._final = False
        self._ready = False
        self._started_at = self._turned_at = clock()
        self._emissions = 0
        self._remember(restored.ledger)
        lease = restored.marks.get("lease", 0)
        self._dispatcher = Dispatcher(step.config, step.admitted, self._table, self._waiting, lease)

    # -- folding ------------------------------------------------------------------------------------------------------

    def fold(self, polled: Polled) -> list[Output]:
        self._emissions += 1
        now = self._clock()
        if now - self._turned_at > self._step.config.heartbeat_timeout_s / 2:
            self._replicas.forgive(now)
            self._started_at = now
        self._turned_at = now
        outputs: list[Output] = []
        for received in polled.records:
            outputs += self._take(received, now)
        if polled.caught_up:
            if not self._ready:
                self._ready = True
                self._forget_released()
                self._started_at = now
            outputs += self._recover(now)
            outputs += self._dispatch()
        cancels, self._cancels = self._cancels, {}
        return [
            *outputs,
            *(
                Output(INBOX, "", Cancel(tuple(names), to.replica, to.incarnation), to.replica)
                for to, names in cancels.items()
            ),
        ]

    def checkpoint(self, positions: Mapping[Place, int]) -> Checkpoint:
        low_water = self._pending.low_water(positions)
        settled = Place(SETTLED.noun, 0)
        needed = (low_water[settled], self._coverage.oldest_offset(), self._released.oldest_emission())
        low_water[settled] = min(offset for offset in needed if offset is not None)
        return Checkpoint(
            low_water=low_water,
            ledger_from=self._table.oldest_emission(),
            marks={"released": self._released.marks(), "lease": self._dispatcher.lease},
        )

    def busy(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def _take(self, received: Received, now: float) -> list[Output]:
        match received.record:
            case Prompt():
                self._waiting.add(received)
            case ReplicaStatus() as status:
                self._replicas.hear(status, now)
            case Trajectory() as trajectory:
                self._finish(received, trajectory)
            case Settled() as settled:
                self._settle(received, settled)
            case WeightVersion() as version:
                self._cover(version)
            case Refused() as refused:
                return self._refuse(received, refused)
        return []

    def _finish(self, received: Received, trajectory: Trajectory) -> None:
        name = trajectory.trajectory_id
        if parse_trajectory_id(name) in self._released:
            return  # a second finish: the first one counts
        self._finished.hold(name, received)
        self._refused.let_go(name)
        owned = self._table.finish(name)
        if owned is not None and owned.work.lease != trajectory.lease:
            self._cancel(owned)

    def _settle(self, received: Received, settled: Settled) -> None:
        name = settled.trajectory_id
        self._released.add(parse_trajectory_id(name), settled.group_size, received.offset)
        self._finished.let_go(name)
        self._refused.let_go(name)
        owned = self._table.finish(name)
        if owned is not None:
            self._cancel(owned)  # a later owner; or the one that finished it, of which the word comes late: no matter
        if not self._coverage.settle(settled, received.offset):
            self._table.release(name)

    def _cover(self, version: WeightVersion) -> None:
        self._newest = max(filter(None, (self._newest, version.version)))
        self._final = self._final or version.final
        for name in self._coverage.cover(version.batches):
            self._table.release(name)

    def _refuse(self, received: Received, refused: Refused) -> list[Output]:
        owned = self._table.owner(refused.trajectory_id)
        if owned is None or owned.work.lease != refused.lease:
            return []
        if refused.retry:
            self._refused.hold(refused.trajectory_id, received)
            return self._again(owned)
        # No replica can run it: the whole group ends, so that its other members wait for nothing.
        prompt = owned.work.prompt
        members = [self._table.unfinished(f"{prompt.prompt_id}.{member}") for member in range(prompt.samples)]
        outputs: list[Output] = []
        for member in filter(None, members):
            if member is not owned and self._table.owner(member.work.trajectory_id) is member:
                self._cancel(member)
            outputs += self._fail(member, refused.reason)
        return outputs

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _recover(self, now: float) -> list[Output]:
        """Work of replicas that are gone is dispatched afresh, under the next lease."""
        timeout = self._step.config.heartbeat_timeout_s
        silent = {replica.status.process for replica in self._replicas.silent(now, timeout)}
        if now - self._started_at >= timeout:  # until then one never heard of may be alive: its heartbeats come in now
            unheard = [owner for owner in self._table.owners() if not self._replicas.known(owner.replica)]
            silent |= {owner.replica // self._step.hosted for owner in unheard}
            self._replicas.presume_gone(unheard)
        for process in sorted(silent):
            self._fence(process)
        outputs: list[Output] = []
        for owned in self._table.orphans(self._is_gone):
            outputs += self._again(owned)
        return outputs

    def _is_gone(self, owner: Owner) -> bool:
        return self._replicas.known(owner.replica) and self._replicas.incarnation(owner.replica) != owner.incarnation

    def _again(self, owned: Owned) -> list[Output]:
        if owned.work.attempt >= self._step.config.max_attempts:
            return self._fail(owned, f"given up after {owned.work.attempt} attempts")
        self._table.lose(owned.work.trajectory_id)
        return []

    def _fail(self, owned: Owned, reason: str) -> list[Output]:
        prompt = owned.work.prompt
        self._table.finish(owned.work.trajectory_id)
        record = failed_trajectory(owned, reason, self._newest, self._now())
        return [Output(TRAJECTORIES, prompt.prompt_id, record, partition_of(prompt.number, self._step.partitions))]

    def _cancel(self, owned: Owned) -> None:
        self._cancels.setdefault(owned.owner, []).append(owned.work.trajectory_id)

    def _dispatch(self) -> list[Output]:
        sent: list[Owned] = []
        for replica in self._replicas.alive():
            if replica.status.state in ("running", "draining"):
                sent += self._dispatcher.evaluation(replica, self._emissions)
                if not self._final:
                    sent += self._dispatcher.training(replica, self._newest, self._emissions)
        now = self._now()
        for owned in sent:
            self._refused.let_go(owned.work.trajectory_id)
        return [Output(INBOX, "", assignment(o.work, o.replica, o.incarnation, now), o.replica) for o in sent]

    # -- remembering --------------------------------------------------------------------------------------------------

    def _remember(self, ledger: tuple[Received, ...]) -> None:
        """Enter the assignments read back."""
        for received in ledger:
            record = received.record
            if not isinstance(record, Assignment):
                continue
            before = self._table.owner(record.trajectory_id)
            if before is None or before.work.lease < record.lease:
                work = Work(record.prompt, record.member, record.lease, record.attempt)
                self._table.assign(Owned(work, record.replica, record.incarnation, 0))

    def _forget_released(self) -> None:
        for name in self._table.names():
            if name not in self._coverage and parse_trajectory_id(name) in self._released:
                self._table.release(name)

    def _is_known(self, work: Work) -> bool:
        key = TrajectoryKey(work.prompt.purpose, work.prompt.number, work.member)
        return work.trajectory_id in self._table or key in self._released
