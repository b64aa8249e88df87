"""The versions of records: what each added, and which of them a release has.

A version adds fields that may be empty; nothing else changes. So a newer release reads what an older one wrote, and can
write for it as long as the fields that it lacks are empty, or only inform.
"""

from __future__ import annotations

from collections.abc import Mapping

from schemas import records
from schemas.release import FIRST

ADDED: Mapping[type, tuple[str, ...]] = {
    records.Prompt: ("messages",),
    records.Assignment: ("prompt.messages", "at_least"),
    records.Trajectory: ("prompt.messages", "conversations", "conversation_rewards", "token_sampler"),
    records.Experience: (
        "trajectory.prompt.messages",
        "trajectory.conversations",
        "trajectory.conversation_rewards",
        "conversation_rewards",
        "trajectory.token_sampler",
    ),
    records.MicroBatch: ("breaks", "context_rewards"),
    records.Release: ("without_kv",),
    records.ReplicaStatus: ("first_incarnation", "kv_address", "unreachable"),
    records.RelayStatus: ("unreachable",),
    records.RelayChain: ("needed",),
    records.RankAddress: ("settings",),
}
"""The field that each version of these records after version 2 has beside the version before."""
OPTIONAL_ADDED: Mapping[type, int] = {records.EpisodeEnd: 4, records.StageStatus: 3, records.TurnRequest: 3}
"""Records whose versions after version 2 added optional fields only, and their newest version."""
VERSIONS: Mapping[type, int] = {
    records.WeightVersion: 3,
    **OPTIONAL_ADDED,
    **{kind: 2 + len(fields) for kind, fields in ADDED.items()},
}
"""Schema versions; 2 for all other records."""
INFORMATION = frozenset(
    {
        *("messages", "prompt.messages", "trajectory.prompt.messages"),
        *("token_sampler", "trajectory.token_sampler"),
        *("at_least", "first_incarnation", "kv_address", "unreachable", "needed", "without_kv"),
    }
)
"""Added fields without which a reader does what it did before: they are left out for an older release."""
_ABSENT = {
    FIRST: {
        *(records.TurnRequest, records.EpisodeEnd, records.TurnEnded),
        *(records.StageGroup, records.GroupPlan, records.StageStatus, records.RelayArrival),
    }
}
"""Records that roles of a release cannot read on a topic that they read. Those on topics of their own are no harm."""
_VERSIONS_IN = {FIRST: {records.WeightVersion: 3, records.RankAddress: 3}}


def version_in(kind: type, release: str) -> int | None:
    """The version of `kind` that roles of `release` read; None if they read none on the topics that they read."""
    if release not in _VERSIONS_IN:
        return VERSIONS.get(kind, 2)
    return None if kind in _ABSENT[release] else _VERSIONS_IN[release].get(kind, 2)
