"""The state of every trajectory: dispatched, generating with a partial response, finished, settled.

The tracker folds the records of replicas, score and the buffer. There is no order between topics: a trajectory may be
settled here before it has finished here, and the last records of an owner may arrive after the first of its successor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow.compute as pc

from operators.io.dead_letters import dead_letter
from operators.io.elements import Output, PartitionKey, ReceivedRecord, Restored
from operators.io.ledger import TrajectoryLedger
from operators.io.partial_pool import PartialPool
from operators.io.pending import PendingOffsets
from operators.placement.inbox_ledger import restore_inboxes
from operators.placement.length_statistics import LengthStatistics
from operators.placement.move_outcomes import MoveOutcomes
from operators.placement.work_table import Leases, Owned, Owner, Work, WorkTable, failed_trajectory
from schemas.block import Block
from schemas.identity import Purpose, TrajectoryKey, parse_trajectory_id, trajectory_id
from schemas.records import (
    AssignmentRejected,
    Cancel,
    FinishReason,
    PolicyVersion,
    Progress,
    Prompt,
    Settled,
    TrajectoryClosed,
    WeightVersion,
)
from schemas.topics import PROGRESS, SETTLED, TRAJECTORIES, partition_of

_FINISHED = ("prompt.purpose", "prompt.number", "member", "lease", "finish_reason")
_TOKENS = ("prompt.token_ids", "response.token_ids")


class FinishedTrajectory(NamedTuple):
    """What placement reads of a generated trajectory."""

    purpose: Purpose
    number: int
    member: int
    lease: int
    finish_reason: FinishReason
    prompt_tokens: int
    response_tokens: int


def finished_trajectories(trajectories: Block) -> Iterator[FinishedTrajectory]:
    """The rows of `trajectories`."""
    columns = [trajectories.column(name).to_pylist() for name in _FINISHED]
    tokens = [pc.list_value_length(trajectories.column(name)).to_pylist() for name in _TOKENS]
    return map(FinishedTrajectory, *columns, *tokens)


class PendingCancels:
    """Trajectories and leases to cancel, by replica, as it has to stop them, or to stop waiting for them."""

    def __init__(self) -> None:
        self._leases: dict[Owner, dict[str, int]] = {}

    def add(self, owner: Owner, name: str, lease: int) -> None:
        """Cancel trajectory `name` at `owner` up to `lease`; lease 0 only ends the wait for a hand-over."""
        leases = self._leases.setdefault(owner, {})
        leases[name] = max(lease, leases.get(name, 0))

    def take(self) -> list[Cancel]:
        """The Cancel records to write; the table is empty afterwards."""
        cancels, self._leases = self._leases, {}
        return [Cancel(tuple(leases), tuple(leases.values()), *owner) for owner, leases in cancels.items()]


class PendingRecords:
    """Records that a restart must read again until a later one supersedes them: one per trajectory, by its id.

    `pending` keeps the low-water mark at or below them.
    """

    def __init__(self, pending: PendingOffsets) -> None:
        self._pending = pending
        self._kept: dict[str, tuple[PartitionKey, int]] = {}

    def keep(self, name: str, received: ReceivedRecord) -> None:
        """Keep the record of trajectory `name` instead of an earlier one."""
        key = PartitionKey(received.topic, received.partition)
        self._pending.add(key, received.offset)
        self.release(name)
        self._kept[name] = (key, received.offset)

    def keep_first(self, name: str, received: ReceivedRecord) -> None:
        """Keep the record of trajectory `name` unless an earlier one is kept."""
        if name not in self._kept:
            self.keep(name, received)

    def release(self, name: str) -> None:
        """Stop keeping the record of trajectory `name`, if there is one."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._pending.remove(*kept)


class TrajectoryTracker:
    """Holds the work table, the partial pool, and the offsets that a restart must read again for them.

    Methods that take a record return the outputs that it causes.
    """

    def __init__(
        self,
        restored: Restored,
        partitions: int,
        max_attempts: int,
        leases: Leases,
        now: Callable[[], int],
        goal: int = 0,
    ) -> None:
        self._partitions, self._max_attempts, self._now, self._goal = partitions, max_attempts, now, goal
        self.pending = PendingOffsets()
        self.table = WorkTable()
        self.pool = PartialPool()
        self.lengths = LengthStatistics()
        self.outcomes = MoveOutcomes()
        self.cancels = PendingCancels()
        newest, final, covered = restored.state.get("manifests", (None, False, -1))
        self.newest = PolicyVersion.parse(newest) if newest else None
        self.final = final and self._is_goal(self.newest)
        self._leases = leases
        self._released = TrajectoryLedger(partitions, restored.state.get("released"))
        self._coverage = Coverage(covered)
        self._finished = PendingRecords(self.pending)
        """Trajectory records, until they are settled."""
        self._rejections = PendingRecords(self.pending)
        """AssignmentRejected records, until the next assignment: the inbox still names the owner that rejected."""
        self._progress = PendingRecords(self.pending)
        """The first Progress under each lease, until a later assignment."""
        invalid = restore_inboxes(restored.ledger, leases.last, self.table, self.pool, self.outcomes)
        self.dead_letters = [self.reject(received, reason) for received, reason in invalid]
        """Dead letters for invalid records of the inboxes that were read back."""
        self._gaps: dict[str, Output] | None = {}
        """During a restart, dead letters for Progress whose beginning is missing: it is released when its trajectory
        ends, and the record of the end may be read later."""

    # -- records ------------------------------------------------------------------------------------------------------

    def finish(self, received: ReceivedRecord, trajectories: Iterable[FinishedTrajectory]) -> list[Output]:
        """Record generated trajectories. The first record of each counts, whatever its lease."""
        outputs: list[Output] = []
        for each in trajectories:
            key = TrajectoryKey(each.purpose, each.number, each.member)
            if key in self._released:
                continue
            name = trajectory_id(*key)
            self._finished.keep(name, received)
            if each.purpose == "train" and each.finish_reason != "failed":  # held-out answers have other lengths
                self.lengths.add(each.prompt_tokens, each.response_tokens)
            outputs += self._end(name, each.lease)
        return outputs

    def settle(self, received: ReceivedRecord, settled: Settled) -> list[Output]:
        """Record that a trajectory is settled."""
        name = settled.trajectory_id
        try:
            key = parse_trajectory_id(name)
        except ValueError as error:
            return [self.reject(received, str(error))]
        self._released.add(key, settled.group_size, received.offset)
        self._finished.release(name)
        outputs = self._end(name, None)
        if not self._coverage.settle(settled, received.offset):
            self.table.release(name)
        return outputs

    def cover(self, version: WeightVersion) -> None:
        """Record a published weight version; the batches that it covers are no longer outstanding."""
        self.newest = max(filter(None, (self.newest, version.version)))
        self.final = self.final or (version.final and self._is_goal(version.version))
        for name in self._coverage.cover(version.batches):
            self.table.release(name)

    def _is_goal(self, version: PolicyVersion | None) -> bool:
        """Whether a final version is that of the present goal: a resumed run may have a later one."""
        return version is not None and version.number >= self._goal

    def reject_assignment(self, received: ReceivedRecord, rejected: AssignmentRejected) -> list[Output]:
        """Record that an owner cannot run a trajectory: it starts afresh elsewhere, or fails with its group."""
        name = rejected.trajectory_id
        if rejected.lease > self._leases.last:
            return [self._reject_lease(received, name, rejected.lease)]
        owned = self.table.owned(name)
        # A later lease than the owner's was rejected when it was to be written, so the inbox does not have it.
        if owned is None or rejected.lease < owned.work.lease:
            return []
        if rejected.retry:
            self._rejections.keep(name, received)
            if name in self.pool:
                self.pool.start_lease(name, rejected.lease, None)
            return self.lose(owned)
        # No replica can run it. The whole group ends, so that nothing waits for its other members.
        prompt = owned.work.prompt
        members = [self.table.unfinished(f"{prompt.prompt_id}.{member}") for member in range(prompt.samples)]
        outputs: list[Output] = []
        for member in filter(None, members):
            if member is not owned and self.table.owned(member.work.trajectory_id) is member:
                self.cancels.add(member.owner, member.work.trajectory_id, member.work.lease)
            outputs += self.fail(member, rejected.reason)
        return outputs

    def progress(self, received: ReceivedRecord, record: Progress, is_alive: Callable[[Owner], bool]) -> list[Output]:
        """Record the tokens that an owner has generated, or the hand-over to its next owner."""
        name, to = record.trajectory_id, record.next_owner
        latest = max(record.lease, 0 if to is None else to.lease)
        if latest > self._leases.last:
            return [self._reject_lease(received, name, latest)]
        current = self.table.unfinished(name)
        if current is None:  # it has ended in the meantime, so its next owner must stop
            if to is not None and is_alive(Owner(to.replica, to.incarnation)):
                self.cancels.add(Owner(to.replica, to.incarnation), name, to.lease)
            return []
        sender = Owner(record.replica, record.incarnation)
        if record.lease < current.work.lease:
            if to is not None and to.lease == current.work.lease:
                return []  # the hand-over was restored from the inbox
            stale = sender if to is None else Owner(to.replica, to.incarnation)
            if stale != current.owner and is_alive(stale):
                self.cancels.add(stale, name, latest)  # it generates a trajectory that another replica owns
            return []
        if record.lease == current.work.lease and sender != current.owner:
            return [self.reject(received, f"{name}: replica {record.replica} does not have lease {record.lease}")]
        complete = self.pool.fold(record)
        if to is not None:
            self.table.complete_hand_over(name, to.lease, Owner(to.replica, to.incarnation))
            self.outcomes.record(name, "handed_over")
            self.pool.hand_over(name, to.lease)
            self._progress.release(name)  # the next owner's assignment contains it
        else:
            self._progress.keep_first(name, received)
        if complete:
            return []
        reason = f"{name}: tokens before {record.start} are missing; it will start afresh if its owner is lost"
        gap = self.reject(received, reason)
        if self._gaps is None:
            return [gap]
        self._gaps[name] = gap
        return []

    # -- decisions ----------------------------------------------------------------------------------------------------

    def lose(self, owned: Owned, *, crashed: bool = True) -> list[Output]:
        """Record that the owner is lost. The trajectory waits for another, or fails after its last attempt.

        A start that ended without tokens is no attempt unless the owner has `crashed`: Kafka may have been away.
        """
        name = owned.work.trajectory_id
        self.outcomes.record(name, "lost")
        fruitless = not self.pool.gained(name)
        if fruitless and crashed and owned.work.attempt >= self._max_attempts:
            return self.fail(owned, f"given up after {owned.work.attempt} attempts")
        self.table.lose(name, forgiven=fruitless and not crashed)
        return []

    def fail(self, owned: Owned, reason: str) -> list[Output]:
        """Finish a trajectory as failed."""
        prompt, name = owned.work.prompt, owned.work.trajectory_id
        self.outcomes.record(name, "finished")
        self.table.finish(name)
        record = failed_trajectory(owned, reason, self.newest, self._now())
        where = partition_of(prompt.number, self._partitions)
        return [Output(TRAJECTORIES, prompt.prompt_id, record, where), *self._close(name)]

    def reject_prompt(self, prompt: Prompt, reason: str) -> list[Output]:
        """Fail every trajectory of a prompt that is too large for any inbox, so that its group completes.

        The failed trajectories omit the content of the prompt, which would fit into no record either.
        """
        without_content = replace(prompt, text="", reference="{}", token_ids=prompt.token_ids.slice(0, 0))
        works = [Work(without_content, member) for member in range(prompt.samples)]
        no_owner = Owner(-1, 0)
        failed = [self.fail(Owned(work, *no_owner, 0), reason) for work in works if not self.is_known(work)]
        return [output for outputs in failed for output in outputs]

    def assign(self, owned: Owned) -> None:
        """Record an assignment that is about to be written."""
        name = owned.work.trajectory_id
        self.table.assign(owned)
        self._rejections.release(name)
        if name in self.pool:
            self.pool.start_lease(name, owned.work.lease, self.pool.get(name))
            self._progress.release(name)

    def is_known(self, work: Work) -> bool:
        """Whether `work` was dispatched, or has ended without dispatch."""
        key = TrajectoryKey(work.prompt.purpose, work.prompt.number, work.member)
        return work.trajectory_id in self.table or key in self._released

    def reject(self, received: ReceivedRecord, reason: str) -> Output:
        """The dead letter for an invalid record."""
        return dead_letter(received, "place trajectories", reason, self._now())

    def _reject_lease(self, received: ReceivedRecord, name: str, lease: int) -> Output:
        return self.reject(received, f"{name}: lease {lease} was never minted, the last is {self._leases.last}")

    # -- restarts -----------------------------------------------------------------------------------------------------

    def low_water(self, positions: Mapping[PartitionKey, int]) -> dict[PartitionKey, int]:
        """The offsets from which a restart must read again."""
        low_water = self.pending.low_water(positions)
        settled = PartitionKey(SETTLED.short_name, 0)
        needed = (low_water[settled], self._coverage.oldest_offset(), self._released.oldest_emission())
        low_water[settled] = min(offset for offset in needed if offset is not None)
        return low_water

    def state(self) -> dict[str, Any]:
        """For the commit note: the settled trajectories, and what a restart needs of manifests, not read again."""
        newest = None if self.newest is None else str(self.newest)
        return {"released": self._released.state(), "manifests": [newest, self.final, self._coverage.covered]}

    def end_restart(self) -> list[Output]:
        """Drop trajectories settled before this start; call it once all records written before it are folded.

        Returns dead letters for the Progress of the others whose beginning is missing.
        """
        for name in self.table.names():
            if name not in self._coverage and parse_trajectory_id(name) in self._released:
                self.table.release(name)
                self.pool.drop(name)
        gaps, self._gaps = self._gaps or {}, None
        return [gap for name, gap in gaps.items() if self.table.unfinished(name) is not None]

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end(self, name: str, lease: int | None) -> list[Output]:
        """End a trajectory, and cancel it wherever else it is generated or expected."""
        self._rejections.release(name)
        hand_over = self.table.hand_over_of(name)
        if hand_over is not None:
            self.cancels.add(hand_over.to, name, hand_over.lease)
        self.outcomes.record(name, "finished" if hand_over is None or lease != hand_over.lease else "handed_over")
        owned = self.table.finish(name)
        # If it is settled here before its finish is read, its owner may have finished it; the owner ignores the cancel.
        if owned is not None and owned.work.lease != lease:
            self.cancels.add(owned.owner, name, owned.work.lease)
        return self._close(name)

    def _close(self, name: str) -> list[Output]:
        """Release what is held for a trajectory; readers of Progress learn that it is closed."""
        self._progress.release(name)
        return [Output(PROGRESS, name, TrajectoryClosed(name))] if self.pool.drop(name) else []


class Coverage:
    """Settled trajectories that are still outstanding, by batch: no weight version covers it yet.

    A manifest covers its batches and all earlier ones, so a slow trainer delays new work. Until its batch is
    covered, a restart must read the Settled record of a trajectory again.
    """

    def __init__(self, covered: int = -1) -> None:
        self._uncovered: dict[int, dict[str, int]] = {}  # by batch: settled trajectories and their offsets
        self.covered = covered
        """The last batch that a manifest covers."""

    def settle(self, settled: Settled, offset: int) -> bool:
        """Record a trajectory settled at `offset`; return whether it is still outstanding."""
        if settled.batch is None or settled.batch <= self.covered:
            return False
        self._uncovered.setdefault(settled.batch, {}).setdefault(settled.trajectory_id, offset)
        return True

    def cover(self, batches: Collection[int]) -> Iterable[str]:
        """Record the `batches` of a manifest; return the trajectories that are no longer outstanding."""
        self.covered = max([self.covered, *batches])
        done = [batch for batch in self._uncovered if batch <= self.covered]
        return [name for batch in done for name in self._uncovered.pop(batch)]

    def __contains__(self, name: str) -> bool:
        return any(name in members for members in self._uncovered.values())

    def oldest_offset(self) -> int | None:
        """The lowest offset that a restart must read again; None if it needs none."""
        # Settled records are read in order, so the first member of a batch has its lowest offset.
        return min((next(iter(members.values())) for members in self._uncovered.values()), default=None)
