"""PlaceTrajectories: the rollout manager. It alone mints leases and decides where each trajectory runs.

A restart rebuilds the table of work from what placement wrote (assignments in the inbox), what replicas wrote
(trajectories) and what was settled; it decides nothing before it has seen all that had been written when it started.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from infra.kafka.fencing import fence
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Output, Place, Polled, Received, Restored
from operators.io.ledger import TrajectoryLedger
from operators.io.pending import PendingOffsets
from operators.placement.config import PlacementConfig
from operators.placement.ending import failed_trajectory
from operators.placement.replicas import Replica, ReplicaTable
from operators.placement.work import Owned, Work, WorkTable, assignment, under_lease
from schemas.identity import parse_trajectory_id
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
    """`admitted` is the most training trajectories dispatched and not settled: (max_staleness + 1) × global batch."""

    config: PlacementConfig
    shard: ShardConfig
    partitions: int
    admitted: int

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
        self._lease = restored.marks.get("lease", 0)
        self._table = WorkTable()
        self._replicas = ReplicaTable()
        self._pending = PendingOffsets()
        self._waiting: dict[str, deque[_Waiting]] = {"train": deque(), "evaluation": deque()}
        self._finished: dict[str, tuple[Place, int]] = {}
        self._uncovered: dict[int, list[tuple[str, int]]] = {}  # batch -> settled trajectories that still count
        self._covered = -1
        self._newest: PolicyVersion | None = None
        self._final = False
        self._ready = False
        self._started_at = clock()
        self._turned_at = clock()
        self._emissions = 0
        for received in restored.ledger:
            if isinstance(received.record, Assignment):
                self._remember(received.record)

    # -- folding ------------------------------------------------------------------------------------------------------

    def fold(self, polled: Polled) -> list[Output]:
        self._emissions += 1
        now = self._clock()
        if now - self._turned_at > self._step.config.heartbeat_timeout_s / 2:
            self._replicas.forgive(now)
        self._turned_at = now
        outputs: list[Output] = []
        for received in polled.records:
            outputs += self._take(received, now)
        if not polled.caught_up:
            return outputs
        if not self._ready:
            self._ready = True
            self._forget_released()
            self._started_at = now
        outputs += self._recover(now)
        outputs += self._dispatch()
        return outputs

    def checkpoint(self, positions: Mapping[Place, int]) -> Checkpoint:
        low_water = self._pending.low_water(positions)
        settled = Place(SETTLED.noun, 0)
        held = [offset for members in self._uncovered.values() for _, offset in members[:1]]
        oldest = self._released.oldest_emission()
        low_water[settled] = min([low_water[settled], *held, *([] if oldest is None else [oldest])])
        return Checkpoint(
            low_water=low_water,
            ledger_from=self._table.oldest_emission(),
            marks={"released": self._released.marks(), "lease": self._lease},
        )

    def busy(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def _take(self, received: Received, now: float) -> list[Output]:
        match received.record:
            case Prompt() as prompt:
                place = Place(received.topic, received.partition)
                self._pending.add(place, received.offset, prompt.samples)
                self._waiting[prompt.purpose].extend(
                    _Waiting(Work(prompt, member), place, received.offset) for member in range(prompt.samples)
                )
            case ReplicaStatus() as status:
                self._replicas.hear(status, now)
            case Trajectory() as trajectory:
                return self._finish(received, trajectory)
            case Settled() as settled:
                self._settle(received, settled)
            case WeightVersion() as version:
                self._cover(version)
            case Refused() as refused:
                return self._refuse(refused)
        return []

    def _finish(self, received: Received, trajectory: Trajectory) -> list[Output]:
        name = trajectory.trajectory_id
        if parse_trajectory_id(name) in self._released or name in self._finished:
            return []  # a second finish: the first one counts
        place = Place(received.topic, received.partition)
        self._pending.add(place, received.offset)
        self._finished[name] = (place, received.offset)
        owned = self._table.finish(name)
        if owned is None or owned.work.lease == trajectory.lease:
            return []
        return [self._cancel(owned)]

    def _settle(self, received: Received, settled: Settled) -> None:
        key = parse_trajectory_id(settled.trajectory_id)
        self._released.add(key, settled.group_size, received.offset)
        finished = self._finished.pop(settled.trajectory_id, None)
        if finished is not None:
            self._pending.remove(*finished)
        if settled.fate == "batched" and settled.batch is not None and settled.batch > self._covered:
            self._uncovered.setdefault(settled.batch, []).append((settled.trajectory_id, received.offset))
        else:
            self._table.release(settled.trajectory_id)

    def _cover(self, version: WeightVersion) -> None:
        self._newest = max(filter(None, (self._newest, version.version)))
        self._final = self._final or version.final
        self._covered = max([self._covered, *version.batches])
        for batch in [batch for batch in self._uncovered if batch <= self._covered]:
            for name, _ in self._uncovered.pop(batch):
                self._table.release(name)

    def _refuse(self, refused: Refused) -> list[Output]:
        owned = self._table.owner(refused.trajectory_id)
        if owned is None or owned.work.lease != refused.lease:
            return []
        if refused.retry:
            return self._again(owned)
        # No replica can run it: the whole group ends, so that its other members wait for nothing.
        prompt = owned.work.prompt
        group = [self._table.owner(f"{prompt.prompt_id}.{member}") for member in range(prompt.samples)]
        return [output for member in group if member is not None for output in self._fail(member, refused.reason)]

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _recover(self, now: float) -> list[Output]:
        """Work of replicas that are gone is dispatched afresh, under the next lease."""
        timeout = self._step.config.heartbeat_timeout_s
        outputs: list[Output] = []
        for silent in self._replicas.silent(now, timeout):
            self._fence(silent.status.process)
        for index in list(self._table.replicas()):
            if not self._replicas.known(index) and now - self._started_at < timeout:
                continue  # it may be alive: its heartbeats come in now
            for owned in self._table.orphans(index, self._replicas.incarnation(index)):
                outputs += self._again(owned)
        return outputs

    def _again(self, owned: Owned) -> list[Output]:
        if owned.work.attempt >= self._step.config.max_attempts:
            return self._fail(owned, f"given up after {owned.work.attempt} attempts")
        self._table.lose(owned.work.trajectory_id)
        return []

    def _fail(self, owned: Owned, reason: str) -> list[Output]:
        work = owned.work
        self._table.finish(work.trajectory_id)
        record = failed_trajectory(owned, reason, self._newest, self._now())
        return [
            Output(TRAJECTORIES, work.prompt.prompt_id, record, partition_of(work.prompt.number, self._step.partitions))
        ]

    def _cancel(self, owned: Owned) -> Output:
        return Output(INBOX, "", Cancel((owned.work.trajectory_id,), owned.replica, owned.incarnation), owned.replica)

    def _dispatch(self) -> list[Output]:
        outputs: list[Output] = []
        for replica in self._replicas.alive():
            if replica.status.state in ("running", "draining"):
                outputs += self._dispatch_evaluation(replica)
                outputs += self._dispatch_training(replica)
        return outputs

    def _dispatch_evaluation(self, replica: Replica) -> list[Output]:
        """Evaluation names its version: it goes where that is loaded, or to an idle replica, which then loads it."""
        index, waiting = replica.status.replica, self._waiting["evaluation"]
        lost = self._table.lost("evaluation")
        busy = self._table.load(index, "evaluation")
        if busy == 0:
            replica.target = None
        if self._table.load(index) == 0 and (lost or waiting):
            replica.target = (lost[0].work if lost else waiting[0].work).prompt.policy_version
        version = replica.target or replica.status.policy_version
        outputs: list[Output] = []
        for owned in lost[: max(0, replica.status.capacity - busy)]:
            if owned.work.prompt.policy_version == version:
                outputs.append(self._assign(owned.work, replica))
        while waiting and busy + len(outputs) < replica.status.capacity:
            if waiting[0].work.prompt.policy_version != version:
                break
            outputs.append(self._start(waiting.popleft(), replica))
        return outputs

    def _dispatch_training(self, replica: Replica) -> list[Output]:
        """Fresh work, under the newest version only: what was announced since is taken between two batches."""
        status, config = replica.status, self._step.config
        version, load = status.policy_version, self._table.load(status.replica, "train")
        if self._final or replica.target is not None or version is None:
            return []
        if self._newest is None or version < self._newest:
            return []
        room = min(status.capacity + config.prefetch - load, replica.quota(load, config.replica_batch))
        outputs = [self._assign(owned.work, replica) for owned in self._table.lost("train")[: max(0, room)]]
        waiting = self._waiting["train"]
        while waiting and len(outputs) < room:
            work = waiting[0].work
            # A group is admitted whole: half a group would wait in the buffer for room that it takes up itself.
            if work.member == 0 and self._table.training() + work.prompt.samples > self._step.admitted:
                break
            outputs.append(self._start(waiting.popleft(), replica))
        replica.sent += len(outputs)
        return outputs

    def _start(self, waiting: _Waiting, replica: Replica) -> Output:
        self._pending.remove(waiting.place, waiting.offset)
        return self._assign(waiting.work, replica)

    def _assign(self, work: Work, replica: Replica) -> Output:
        self._lease += 1
        work = under_lease(work, self._lease)
        index, incarnation = replica.status.replica, replica.status.incarnation
        self._table.assign(Owned(work, index, incarnation, self._emissions))
        return Output(INBOX, "", assignment(work, index, incarnation, self._now()), index)

    # -- restarting ---------------------------------------------------------------------------------------------------

    def _remember(self, record: Assignment) -> None:
        self._lease = max(self._lease, record.lease)
        before = self._table.owner(record.trajectory_id)
        if before is None or before.work.lease < record.lease:
            work = Work(record.prompt, record.member, record.lease, record.attempt)
            self._table.assign(Owned(work, record.replica, record.incarnation, 0))

    def _forget_released(self) -> None:
        counting = {name for members in self._uncovered.values() for name, _ in members}
        for name in self._table.names():
            if name not in counting and parse_trajectory_id(name) in self._released:
                self._table.release(name)


class _Waiting(NamedTuple):
    """Work that was never dispatched, and the prompt record that a restart would need for it."""

    work: Work
    place: Place
    offset: int
