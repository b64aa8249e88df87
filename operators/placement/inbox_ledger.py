"""What a start restores from the inboxes: the owner of every trajectory, and the moves under way."""

from __future__ import annotations

from operators.io.elements import ReceivedRecord
from operators.io.partial_pool import PartialPool, PooledPartial
from operators.placement.move_outcomes import MoveOutcomes
from operators.placement.work_table import HandOver, Owned, Owner, Work, WorkTable
from schemas.records import Assignment, Release


def restore_inboxes(
    ledger: tuple[ReceivedRecord, ...], last_lease: int, table: WorkTable, pool: PartialPool, outcomes: MoveOutcomes
) -> list[tuple[ReceivedRecord, str]]:
    """Enter the assignments and releases in `ledger`; return invalid records with the reason.

    Placement and, for hand-overs, the previous owner write assignments. No lease above `last_lease` was minted.
    """
    releases, invalid = [], []
    for received in ledger:
        record = received.record
        if isinstance(record, Release):
            releases.append(record)
        elif isinstance(record, Assignment):
            if record.lease > last_lease:
                reason = f"{record.trajectory_id}: lease {record.lease} was never minted, the last is {last_lease}"
                invalid.append((received, reason))
            else:
                _restore_assignment(record, table, pool)
    for release in releases:
        _restore_release(release, table, outcomes)
    return invalid


def _restore_assignment(record: Assignment, table: WorkTable, pool: PartialPool) -> None:
    name = record.trajectory_id
    before = table.owned(name)
    if before is not None and before.work.lease >= record.lease:
        return
    work = Work(record.prompt, record.member, record.lease, record.attempt)
    table.assign(Owned(work, record.replica, record.incarnation, 0))
    if record.partial is not None:
        pool.start_lease(name, record.lease, PooledPartial(record.partial, record.version_spans))
    else:
        pool.drop(name)


def _restore_release(release: Release, table: WorkTable, outcomes: MoveOutcomes) -> None:
    moving = []
    to = Owner(release.destination, release.destination_incarnation)
    for name, lease in zip(release.trajectory_ids, release.leases, strict=False):
        owned = table.owned(name)
        if owned is not None and owned.owner == (release.replica, release.incarnation) and owned.work.lease < lease:
            table.start_hand_over(name, HandOver(lease, to))
            moving.append(name)
    outcomes.plan(release.plan_id.rpartition(".")[0], release.replica, release.destination, moving)
