"""Assignments and commands for a replica."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.identity import trajectory_id
from schemas.records.prompts import Prompt
from schemas.records.trajectories import Response, VersionSpan
from schemas.records.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class KVManifest:
    """Where the KV of a trajectory's first `tokens` tokens (prompt included) can be fetched, for a limited time.

    It is a claim check for `bytes` bytes, stored under the secret `name` at `address` ("host:port"), computed under
    `policy_version`, in the layout of the engine. `chunk_checksums` has the CRC-32C of every `chunk_bytes` of them.
    With 0 bytes there is nothing to fetch.
    """

    address: str
    name: str
    policy_version: PolicyVersion
    tokens: int
    bytes: int
    chunk_bytes: int
    chunk_checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assigns sample `member` of `prompt` to one incarnation of one replica.

    Written by placement, and by a rollout that hands a trajectory over; read by rollout, and by placement when it
    starts.

    With `policy_version` None the replica generates under its own version, once that is `at_least` this one; a resumed
    trajectory names its version.
    Generation resumes from `partial`, which was generated under `version_spans`. `lease` rises whenever the owner
    changes, `attempt` whenever a start has produced no tokens. With `kv` the replica need not recompute the KV of the
    known tokens; the KV may be gone by then.
    """

    prompt: Prompt
    member: int
    lease: int
    attempt: int
    replica: int
    incarnation: int
    policy_version: PolicyVersion | None
    partial: Response | None
    assigned_at: int
    version_spans: tuple[VersionSpan, ...] = ()
    kv: KVManifest | None = None
    at_least: PolicyVersion | None = None

    @property
    def trajectory_id(self) -> str:
        return trajectory_id(self.prompt.purpose, self.prompt.number, self.member)


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stops work on these trajectories, and reservations for them: they have ended, or stay on another replica.

    A trajectory is cancelled only under the lease in `leases` or an older one; a later assignment to the same replica
    stays. Lease 0 only ends the reservation.
    """

    trajectory_ids: tuple[str, ...]
    leases: tuple[int, ...]
    replica: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """Keeps weights and room for trajectories to come: `kv_tokens` tokens in all, under `policy_version`.

    Written by placement, read by rollout, which confirms by naming `plan_id` in its heartbeats.
    """

    plan_id: str
    policy_version: PolicyVersion
    trajectory_ids: tuple[str, ...]
    kv_tokens: int
    replica: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Release:
    """Hands these trajectories over to an incarnation of another replica, each under its new lease.

    Written by placement, read by rollout. `leases` are as many as `trajectory_ids`. `without_kv`: the destination
    cannot connect to this replica, and computes their KV again.
    """

    plan_id: str
    trajectory_ids: tuple[str, ...]
    leases: tuple[int, ...]
    destination: int
    destination_incarnation: int
    replica: int
    incarnation: int
    without_kv: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new work for the rest of this incarnation. Written by people, read by rollout."""

    replica: int
    incarnation: int
