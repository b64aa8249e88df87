"""Groups of replicas that run a model in stages while it is being loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schemas.records.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class RelayArrival:
    """The parts of a version that has not arrived completely at a relay.

    Written by relay, read by placement. `chunks` are the first and the end (exclusive) of each run of chunks that have
    arrived with the right checksum, `host` and `store` identify the machine's folder of weights. At `bytes_per_s` it
    takes another `seconds_left` seconds; −1 if nothing arrives. Without a version nothing is arriving.
    """

    relay: int
    host: str
    store: str
    version: PolicyVersion | None
    chunks: tuple[int, ...]
    bytes_per_s: float
    seconds_left: float
    sent_at: int


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a group: the replica that runs layers `first` to `end` (exclusive), and its `address` for peers."""

    replica: int
    incarnation: int
    address: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class StageGroup:
    """Runs `version` in `stages`, of which the first leads: it has the requests, the embedding and the output weights.

    Written by placement into the leader's inbox, read by rollout. A leader that has a group replaces it: the requests
    continue with their KV.
    """

    group: str
    version: PolicyVersion
    stages: tuple[Stage, ...]
    replica: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class StageStatus:
    """A replica's part in stage groups: a heartbeat.

    Written by rollout, read by placement. Weights of the machine are in `store` on `host`; peers reach the replica at
    `address`. `refusal` says why it cannot run in stages; empty if it can. `group` is the group that it leads, else
    the one in which it runs layers `first` to `end`. `failed` is the last group that it was to lead and could not form,
    `error` the reason, `lost` the replicas that failed. `forming` is the group that it is forming now. `gone` are the
    replicas that the group which it leads has lost, so that it computes nothing; None while it computes.
    """

    replica: int
    incarnation: int
    host: str
    store: str
    address: str
    refusal: str
    version: PolicyVersion | None
    group: str
    leads: bool
    first: int
    end: int
    failed: str
    error: str
    lost: tuple[int, ...]
    sent_at: int
    forming: str | None = None
    gone: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A stage group that placement has formed, changed or ended, for people and tools.

    `replaces` is the group that it continues, `seconds_left` the expected time until the first member has the whole
    version (−1: unknown). `failed`: the reason is in `note`.
    """

    group: str
    policy_version: PolicyVersion
    stages: tuple[Stage, ...]
    action: Literal["formed", "changed", "failed", "ended"]
    replaces: str
    seconds_left: float
    note: str
    planned_at: int
