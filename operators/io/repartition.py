"""RepartitionTrajectories: the stream of trajectories, re-partitioned by the replica that generates each.

A replica's inbox is one partition. A decision to dispatch, resume or move a trajectory becomes one record in the
partition of the replica that has to act on it: for a move first its source, which holds the tokens, then the
destination. Placement decides; the source of a move writes the hand-over. Both use this step, the only one that builds
an `Assignment`. Requests of agents and a person's drain, which move no trajectory, go to an inbox without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from operators.io.elements import Output
from operators.io.map_outputs import MapOutputs
from schemas.bounds import fits_inbox
from schemas.identity import trajectory_id
from schemas.records import (
    Assignment,
    AssignmentRejected,
    Cancel,
    KVManifest,
    NextOwner,
    PolicyVersion,
    Prompt,
    Release,
    Reserve,
    Response,
    StageGroup,
    VersionSpan,
)
from schemas.topics import INBOX, PROGRESS, inbox_partition

PlacementReason = Literal["dispatch", "resume", "failover", "hand_over"]
"""`dispatch`: its first owner; `resume`: its owner was lost, and it continues from the recorded tokens; `failover`: the
same without recorded tokens; `hand_over`: its owner gives it to another."""
MoveReason = Literal["repack", "drain", "balance"]
"""`repack` empties replicas, `drain` those that drain, `balance` moves waiting trajectories."""


class Placed(NamedTuple):  # one a trajectory: a dataclass costs three times as much
    """The decision that sample `member` of `prompt` continues at `to` from `partial`. The fields are as in Assignment.

    It becomes an Assignment in the inbox of `to`.
    """

    prompt: Prompt
    member: int
    attempt: int
    to: NextOwner
    reason: PlacementReason
    policy_version: PolicyVersion | None
    partial: Response | None
    version_spans: tuple[VersionSpan, ...]
    placed_at: int
    kv: KVManifest | None = None
    at_least: PolicyVersion | None = None

    @property
    def trajectory_id(self) -> str:
        return trajectory_id(self.prompt.purpose, self.prompt.number, self.member)


@dataclass(frozen=True, slots=True)
class Moved:
    """The decision that an incarnation of a replica hands trajectories over to `to`, each under its new lease.

    It becomes a Release in the inbox of the source; the source then places each at `to`.
    """

    plan_id: str
    trajectory_ids: tuple[str, ...]
    leases: tuple[int, ...]
    source: int
    source_incarnation: int
    to: int
    to_incarnation: int
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
            counts[f"moved/{decision.reason}"] += len(decision.trajectory_ids)
    if rejected := _rejections(outputs) - _rejections(decisions):
        counts["rejected"] = rejected
    return counts


def _rejections(outputs: Sequence[Any]) -> int:
    return sum(isinstance(each, Output) and isinstance(each.record, AssignmentRejected) for each in outputs)


def assignment_of(placed: Placed) -> Assignment:
    """The record of `placed`."""
    return Assignment(
        prompt=placed.prompt,
        member=placed.member,
        lease=placed.to.lease,
        attempt=placed.attempt,
        replica=placed.to.replica,
        incarnation=placed.to.incarnation,
        policy_version=placed.policy_version,
        partial=placed.partial,
        assigned_at=placed.placed_at,
        version_spans=placed.version_spans,
        kv=placed.kv,
        at_least=placed.at_least,
    )


def _routed(outputs: Sequence[Any]) -> Iterator[Any]:
    live: Mapping[int, int] | None = None
    leases: dict[str, int] = {}
    for output in outputs:
        match output:  # the most frequent first
            case Output():
                yield output
            case Placed():
                yield _placed(output, live, leases)
            case Moved():
                release = _release_of(output)
                if not _is_replaced(release, live):
                    yield _to_inbox(release)
            case Cancel() | Reserve() | StageGroup():
                if not _is_replaced(output, live):
                    yield _to_inbox(output)
            case LiveReplicas():
                live = output.incarnations
            case _:
                yield output


def _placed(placed: Placed, live: Mapping[int, int] | None, leases: dict[str, int]) -> Output:
    """The assignment of `placed`, or its rejection. `leases` has the last lease written, by trajectory."""
    to, name = placed.to, placed.trajectory_id
    if live is not None and live.get(to.replica) != to.incarnation:
        return _rejected(placed, f"incarnation {to.incarnation} of replica {to.replica} is not alive", retry=True)
    if to.lease <= leases.get(name, -1):
        return _rejected(placed, f"lease {to.lease} does not exceed lease {leases[name]}", retry=True)
    fitting = _fitting(placed)
    if fitting is None:
        tokens = 0 if placed.partial is None else len(placed.partial.token_ids)
        reason = f"the prompt and a partial response of {tokens} tokens are too large for an inbox"
        return _rejected(placed, reason, retry=fits_inbox(placed.prompt, 0))
    leases[name] = to.lease
    return _to_inbox(assignment_of(fitting))


def _fitting(placed: Placed) -> Placed | None:
    """`placed` as it fits in a record: without its KV if that is too large, since KV can be recomputed; else None."""
    tokens = 0 if placed.partial is None else len(placed.partial.token_ids)
    if fits_inbox(placed.prompt, tokens, len(placed.version_spans), placed.kv):
        return placed
    return placed._replace(kv=None) if fits_inbox(placed.prompt, tokens, len(placed.version_spans)) else None


def _release_of(moved: Moved) -> Release:
    return Release(
        plan_id=moved.plan_id,
        trajectory_ids=moved.trajectory_ids,
        leases=moved.leases,
        destination=moved.to,
        destination_incarnation=moved.to_incarnation,
        replica=moved.source,
        incarnation=moved.source_incarnation,
    )


def _is_replaced(command: Cancel | Reserve | Release | StageGroup, live: Mapping[int, int] | None) -> bool:
    """Whether a later incarnation of the replica is alive; one without a heartbeat yet may be alive itself."""
    return live is not None and live.get(command.replica, -1) > command.incarnation


def _to_inbox(record: Assignment | Cancel | Reserve | Release | StageGroup) -> Output:
    return Output(INBOX, "", record, inbox_partition(record.replica))


def _rejected(placed: Placed, reason: str, retry: bool) -> Output:
    to = placed.to
    rejected = AssignmentRejected(placed.trajectory_id, to.lease, to.replica, to.incarnation, reason, retry)
    return Output(PROGRESS, f"rollout-{to.replica}", rejected)
