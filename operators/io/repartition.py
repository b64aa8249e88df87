"""RepartitionTrajectories: the stream of trajectories, re-partitioned by the replica that generates each.

A replica's inbox is one partition. A decision to dispatch, resume or move a trajectory becomes one record in the
partition of the replica that has to act on it: for a move first its source, which holds the tokens, then the
destination. Placement decides; the source of a move writes the hand-over. Both use this step, the only one that writes
an `Assignment`. Requests of agents and a person's drain, which move no trajectory, go to an inbox without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from operators.io.elements import Output
from operators.io.map_outputs import MapOutputs
from schemas.bounds import fits_inbox
from schemas.records import Assignment, AssignmentRejected, Cancel, Release, Reserve, StageGroup
from schemas.topics import INBOX, PROGRESS, inbox_partition

PlacementReason = Literal["dispatch", "resume", "failover", "hand_over"]
"""`dispatch`: its first owner; `resume`: its owner was lost, and it continues from the recorded tokens; `failover`: the
same without recorded tokens; `hand_over`: its owner gives it to another."""
MoveReason = Literal["repack", "drain", "balance"]
"""`repack` empties replicas, `drain` those that drain, `balance` moves waiting trajectories."""


class Placed(NamedTuple):
    """The decision that a trajectory continues at the owner in `assignment`, which goes to that owner's inbox."""

    assignment: Assignment
    reason: PlacementReason


class Moved(NamedTuple):
    """The decision that a replica hands trajectories over to another, each under its new lease.

    `release` goes to the inbox of the source; the source then places each at the destination.
    """

    release: Release
    reason: MoveReason


@dataclass(frozen=True, slots=True)
class LiveReplicas:
    """The live incarnation of each replica, by which later decisions of the same emission are checked."""

    incarnations: Mapping[int, int]


class RepartitionTrajectories(MapOutputs):
    """Routes decisions and commands to the inbox of their replica: one record each, in order.

    A `Placed` that cannot be written becomes an AssignmentRejected, which placement reads: its trajectory is then
    assigned again, or fails with its group. That is the case if it does not fit in a record, and, in an emission with
    `LiveReplicas`, if its destination is not one of them. A command for a replaced incarnation is dropped.
    """

    writes = (INBOX,)

    def __init__(self) -> None:
        super().__init__(repartition, count_decisions)


def repartition(outputs: Sequence[Any]) -> list[Any]:
    """The inbox records of the decisions and commands in `outputs`; all other outputs stay, in their place."""
    return list(_routed(outputs))


def count_decisions(decisions: Sequence[Any], outputs: Sequence[Any]) -> Counter[str]:
    """The counters of the step: trajectories placed and moved, by reason, and rejections."""
    counts = Counter(f"placed/{each.reason}" for each in decisions if isinstance(each, Placed))
    for decision in decisions:
        if isinstance(decision, Moved):
            counts[f"moved/{decision.reason}"] += len(decision.release.trajectory_ids)
    if rejected := _rejections(outputs) - _rejections(decisions):
        counts["rejected"] = rejected
    return counts


def _rejections(outputs: Sequence[Any]) -> int:
    return sum(isinstance(each, Output) and isinstance(each.record, AssignmentRejected) for each in outputs)


def _routed(outputs: Sequence[Any]) -> Iterator[Any]:
    live: Mapping[int, int] | None = None
    leases: dict[str, int] = {}
    for output in outputs:
        match output:  # the most frequent first
            case Output():
                yield output
            case Placed():
                yield _assigned(output.assignment, live, leases)
            case Moved() | Cancel() | Reserve() | StageGroup():
                command = output.release if isinstance(output, Moved) else output
                if not _is_replaced(command, live):
                    yield _to_inbox(command)
            case LiveReplicas():
                live = output.incarnations
            case _:
                yield output


def _assigned(given: Assignment, live: Mapping[int, int] | None, leases: dict[str, int]) -> Output:
    """The record of `given`, or its rejection. `leases` has the last lease written, by trajectory."""
    name = given.trajectory_id
    if live is not None and live.get(given.replica) != given.incarnation:
        return _rejected(given, f"incarnation {given.incarnation} of replica {given.replica} is not alive", retry=True)
    if given.lease <= leases.get(name, -1):
        return _rejected(given, f"lease {given.lease} does not exceed lease {leases[name]}", retry=True)
    tokens, spans = 0 if given.partial is None else len(given.partial.token_ids), len(given.version_spans)
    if not fits_inbox(given.prompt, tokens, spans, given.kv):
        given = replace(given, kv=None)  # it can be computed again
        if not fits_inbox(given.prompt, tokens, spans):
            reason = f"the prompt and a partial response of {tokens} tokens are too large for an inbox"
            return _rejected(given, reason, retry=fits_inbox(given.prompt, 0))
    leases[name] = given.lease
    return _to_inbox(given)


def _is_replaced(command: Cancel | Reserve | Release | StageGroup, live: Mapping[int, int] | None) -> bool:
    """Whether a later incarnation of the replica is alive; one without a heartbeat yet may be alive itself."""
    return live is not None and live.get(command.replica, -1) > command.incarnation


def _to_inbox(record: Assignment | Cancel | Reserve | Release | StageGroup) -> Output:
    return Output(INBOX, "", record, inbox_partition(record.replica))


def rejection(assignment: Assignment, reason: str, *, retry: bool) -> AssignmentRejected:
    """The record that rejects `assignment`; with `retry` it starts afresh elsewhere."""
    a = assignment
    return AssignmentRejected(a.trajectory_id, a.lease, a.replica, a.incarnation, reason, retry)


def _rejected(given: Assignment, reason: str, retry: bool) -> Output:
    return Output(PROGRESS, f"rollout-{given.replica}", rejection(given, reason, retry=retry))
