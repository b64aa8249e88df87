"""What has become of every trajectory: dispatched, under way with what it has so far, finished, settled.

The one fold of what replicas, score and the buffer write. Between topics there is no order: a trajectory may be settled
here before it has finished here, and an owner's last words may come after its successor's first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from operators.io.dead_letters import dead_letter
from operators.io.elements import Output, PartitionKey, ReceivedRecord, Restored
from operators.io.ledger import TrajectoryLedger
from operators.io.pending import PendingOffsets
from operators.placement.coverage import Coverage
from operators.placement.ending import failed_trajectory
from operators.placement.leases import Leases
from operators.placement.lengths import LengthsSeen
from operators.placement.move_outcomes import MoveOutcomes
from operators.placement.pending_records import PendingRecords
from operators.placement.pool import PartialPool, PooledPartial
from operators.placement.work import HandOver, Owned, Owner, Work, WorkTable
from schemas.identity import TrajectoryKey, parse_trajectory_id
from schemas.records import (
    Assignment,
    AssignmentRejected,
    Cancel,
    PolicyVersion,
    Progress,
    Prompt,
    Release,
    Settled,
    Trajectory,
    TrajectoryClosed,
    WeightVersion,
)
from schemas.topics import INBOX, PROGRESS, SETTLED, TRAJECTORIES, partition_of


class Tracking:
    """Holds the table of work, the pool, and the offsets that a restart must read again for them.

    Methods that take a record in return what is to be written because of it.
    """

    def __init__(
        self, restored: Restored, partitions: int, max_attempts: int, leases: Leases, now: Callable[[], int]
    ) -> None:
        self._partitions, self._max_attempts, self._now = partitions, max_attempts, now
        self.pending = PendingOffsets()
        self.table = WorkTable()
        self.pool = PartialPool()
        self.lengths = LengthsSeen()
        self.outcomes = MoveOutcomes()
        newest, self.final, covered = restored.state.get("manifests", (None, False, -1))
        self.newest = PolicyVersion.parse(newest) if newest else None
        self._leases = leases
        self._released = TrajectoryLedger(partitions, restored.state.get("released"))
        self._coverage = Coverage(covered)
        self._finished = PendingRecords(self.pending)  # until they are settled
        self._refused = PendingRecords(
            self.pending
        )  # until they are assigned again: the inbox says that their owners have them
        self._told = PendingRecords(self.pending)  # the first Progress under a lease, until there is a later assignment
        self._cancels: dict[Owner, dict[str, int]] = {}
        self.rejections = self._remember(restored.ledger)
        """What cannot be right of all that was read back."""

    # -- what is read -------------------------------------------------------------------------------------------------

    def finish(self, received: ReceivedRecord, trajectory: Trajectory) -> list[Output]:
        """A trajectory has been generated. The first word of it counts, whatever its lease."""
        name = trajectory.trajectory_id
        if parse_trajectory_id(name) in self._released:
            return []
        self._finished.hold(name, received)
        if trajectory.finish_reason != "failed":
            self.lengths.add(len(trajectory.prompt.token_ids), len(trajectory.response.token_ids))
        return self._end(name, trajectory.lease)

    def settle(self, received: ReceivedRecord, settled: Settled) -> list[Output]:
        """A trajectory's story has ended."""
        name = settled.trajectory_id
        try:
            key = parse_trajectory_id(name)
        except ValueError as error:
            return [self.reject(received, str(error))]
        self._released.add(key, settled.group_size, received.offset)
        self._finished.let_go(name)
        outputs = self._end(name, None)
        if not self._coverage.settle(settled, received.offset):
            self.table.release(name)
        return outputs

    def cover(self, version: WeightVersion) -> None:
        """A weight version was published: the batches that it covers count no more."""
        self.newest = max(filter(None, (self.newest, version.version)))
        self.final = self.final or version.final
        for name in self._coverage.cover(version.batches):
            self.table.release(name)

    def refuse(self, received: ReceivedRecord, refused: AssignmentRejected) -> list[Output]:
        """An owner cannot run its trajectory: it starts afresh elsewhere, or ends with its group if nobody can."""
        name = refused.trajectory_id
        owned = self.table.owner(name)
        if owned is None or owned.work.lease != refused.lease:
            return []
        if refused.retry:
            self._refused.hold(name, received)
            if name in self.pool:
                self.pool.begin(name, refused.lease, None)
            return self.lose(owned)
        # No replica can run it: the whole group ends, so that its other members wait for nothing.
        prompt = owned.work.prompt
        members = [self.table.unfinished(f"{prompt.prompt_id}.{member}") for member in range(prompt.samples)]
        outputs: list[Output] = []
        for member in filter(None, members):
            if member is not owned and self.table.owner(member.work.trajectory_id) is member:
                self._cancel(member.owner, member.work.trajectory_id, member.work.lease)
            outputs += self.fail(member, refused.reason)
        return outputs

    def progress(self, received: ReceivedRecord, record: Progress, is_alive: Callable[[Owner], bool]) -> list[Output]:
        """An owner says what its trajectory has gained, or that it has given it away."""
        name, to = record.trajectory_id, record.next_owner
        latest = max(record.lease, 0 if to is None else to.lease)
        if latest > self._leases.last:
            return [self.reject(received, f"{name}: lease {latest} was never given, the last is {self._leases.last}")]
        current = self.table.unfinished(name)
        if current is None:  # it has ended meanwhile, so its next owner need not go on
            if to is not None and is_alive(Owner(to.replica, to.incarnation)):
                self._cancel(Owner(to.replica, to.incarnation), name, to.lease)
            return []
        teller = Owner(record.replica, record.incarnation)
        if record.lease < current.work.lease:
            if to is not None and to.lease == current.work.lease:
                return []  # known from the inbox
            late = teller if to is None else Owner(to.replica, to.incarnation)
            if late != current.owner and is_alive(late):
                self._cancel(late, name, latest)  # it works on what is another's
            return []
        if record.lease == current.work.lease and teller != current.owner:
            return [self.reject(received, f"{name}: replica {record.replica} does not have lease {record.lease}")]
        whole = self.pool.fold(record)
        if to is not None:
            self.table.hand_over(name, to.lease, Owner(to.replica, to.incarnation))
            self.outcomes.record(name, "handed_over")
            self.pool.hand_over(name, to.lease)
            self._told.let_go(name)  # the next owner's assignment holds it all
        else:
            self._told.hold_first(name, received)
        reason = f"{name}: what came before token {record.start} is missing; it will start afresh if its owner is lost"
        return [] if whole else [self.reject(received, reason)]

    # -- what is decided ----------------------------------------------------------------------------------------------

    def lose(self, owned: Owned) -> list[Output]:
        """The owner is gone: the trajectory waits for its next one, or ends if it has come to nothing too often."""
        name = owned.work.trajectory_id
        self.outcomes.record(name, "lost")
        if owned.work.attempt >= self._max_attempts and not self.pool.gained(name):
            return self.fail(owned, f"given up after {owned.work.attempt} attempts")
        self.table.lose(name)
        return []

    def fail(self, owned: Owned, reason: str) -> list[Output]:
        """End a trajectory that nobody will generate."""
        prompt, name = owned.work.prompt, owned.work.trajectory_id
        self.outcomes.record(name, "finished")
        self.table.finish(name)
        record = failed_trajectory(owned, reason, self.newest, self._now())
        where = partition_of(prompt.number, self._partitions)
        return [Output(TRAJECTORIES, prompt.prompt_id, record, where), *self._close(name)]

    def turn_away(self, prompt: Prompt, reason: str) -> list[Output]:
        """End every trajectory of a prompt that fits nowhere, so that whoever waits for its group goes on.

        What is said of them is without the prompt's content: that would fit into no record either.
        """
        without = replace(prompt, text="", reference="{}", token_ids=prompt.token_ids.slice(0, 0))
        works = [Work(without, member) for member in range(prompt.samples)]
        nobody = Owner(-1, 0)
        ended = [self.fail(Owned(work, *nobody, 0), reason) for work in works if not self.is_known(work)]
        return [output for outputs in ended for output in outputs]

    def assign(self, owned: Owned) -> PooledPartial | None:
        """`owned` is to be written as an assignment; returns what it resumes from."""
        name = owned.work.trajectory_id
        self.table.assign(owned)
        self._refused.let_go(name)
        if name not in self.pool:
            return None
        partial = self.pool.get(name)
        self.pool.begin(name, owned.work.lease, partial)
        self._told.let_go(name)
        return partial

    def is_known(self, work: Work) -> bool:
        """Whether `work` was dispatched, or has ended without it."""
        key = TrajectoryKey(work.prompt.purpose, work.prompt.number, work.member)
        return work.trajectory_id in self.table or key in self._released

    def call_off(self, owner: Owner, name: str) -> None:
        """Tell `owner` to wait no more for trajectory `name`; if it has it meanwhile it keeps it."""
        self._cancel(owner, name, 0)

    def take_cancels(self) -> list[Output]:
        """Who is to stop what."""
        cancels, self._cancels = self._cancels, {}
        return [
            Output(INBOX, "", Cancel(tuple(names), tuple(names.values()), *to), to.replica)
            for to, names in cancels.items()
        ]

    # -- what a restart needs -----------------------------------------------------------------------------------------

    def low_water(self, positions: Mapping[PartitionKey, int]) -> dict[PartitionKey, int]:
        """The offsets from which a restart must read again."""
        low_water = self.pending.low_water(positions)
        settled = PartitionKey(SETTLED.short_name, 0)
        needed = (low_water[settled], self._coverage.oldest_offset(), self._released.oldest_emission())
        low_water[settled] = min(offset for offset in needed if offset is not None)
        return low_water

    def state(self) -> dict[str, Any]:
        """For a commit's note: the trajectories that have been settled, and what the manifests said until now, which a
        restart does not read again.
        """
        newest = None if self.newest is None else str(self.newest)
        return {"released": self._released.state(), "manifests": [newest, self.final, self._coverage.covered]}

    def forget_released(self) -> None:
        """All that was written before this start has been seen: what was settled then is not under way."""
        for name in self.table.names():
            if name not in self._coverage and parse_trajectory_id(name) in self._released:
                self.table.release(name)
                self.pool.drop(name)

    def reject(self, received: ReceivedRecord, reason: str) -> Output:
        """Set aside a record that cannot be right."""
        return dead_letter(received, "place trajectories", reason, self._now())

    def _remember(self, ledger: tuple[ReceivedRecord, ...]) -> list[Output]:
        """Enter what the inboxes say: who was given what, by placement or by the owner before."""
        releases, rejections = [], []
        for received in ledger:
            record = received.record
            if isinstance(record, Release):
                releases.append(record)
            elif isinstance(record, Assignment):
                name = record.trajectory_id
                if record.lease > self._leases.last:
                    reason = f"{name}: lease {record.lease} was never given, the last is {self._leases.last}"
                    rejections.append(self.reject(received, reason))
                    continue
                before = self.table.owner(name)
                if before is not None and before.work.lease >= record.lease:
                    continue
                work = Work(record.prompt, record.member, record.lease, record.attempt)
                self.table.assign(Owned(work, record.replica, record.incarnation, 0))
                if record.partial is not None:
                    self.pool.begin(name, record.lease, PooledPartial(record.partial, record.version_spans))
                else:
                    self.pool.drop(name)
        for order in releases:
            leaving = []
            for name, lease in zip(order.trajectory_ids, order.leases, strict=False):
                owned = self.table.owner(name)
                if owned is not None and owned.owner == (order.replica, order.incarnation) and owned.work.lease < lease:
                    to = Owner(order.destination, order.destination_incarnation)
                    self.table.release_to(name, HandOver(lease, to))
                    leaving.append(name)
            self.outcomes.plan(order.plan_id.rpartition(".")[0], order.replica, order.destination, leaving)
        return rejections

    # -- endings ------------------------------------------------------------------------------------------------------

    def _end(self, name: str, lease: int | None) -> list[Output]:
        """The trajectory goes on no more; whoever else works on it or waits for it is told."""
        self._refused.let_go(name)
        leaving = self.table.leaving(name)
        if leaving is not None:
            self._cancel(leaving.to, name, leaving.lease)
        self.outcomes.record(name, "finished" if leaving is None or lease != leaving.lease else "handed_over")
        owned = self.table.finish(name)
        # Settled before its finish is seen here, it may be its owner that finished it: then it passes the word over.
        if owned is not None and owned.work.lease != lease:
            self._cancel(owned.owner, name, owned.work.lease)
        return self._close(name)

    def _close(self, name: str) -> list[Output]:
        self._told.let_go(name)
        return [Output(PROGRESS, name, TrajectoryClosed(name))] if self.pool.drop(name) else []

    def _cancel(self, owner: Owner, name: str, lease: int) -> None:
        names = self._cancels.setdefault(owner, {})
        names[name] = max(lease, names.get(name, 0))
