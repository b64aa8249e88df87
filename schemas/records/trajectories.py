"""What was generated, what it was worth, and how its story ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schemas.array_fields import Flags, Floats, TokenIds
from schemas.identity import trajectory_id
from schemas.records.prompts import Prompt
from schemas.records.versions import PolicyVersion

FinishReason = Literal["stop", "length", "failed"]


Ending = Literal["done", "turns", "length", "failed"]

Outcome = Literal["batched", "dropped", "failed", "evaluated", "imported"]


@dataclass(frozen=True, slots=True)
class Response:
    """Tokens made so far: ids, behaviour logprobs and loss mask, equally long.

    Loss mask False marks an environment's.
    """

    token_ids: TokenIds
    logprobs: Floats
    loss_mask: Flags


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """`length` consecutive response tokens made under `version`."""

    version: PolicyVersion
    length: int


@dataclass(frozen=True, slots=True)
class Episode:
    """What an environment gave a trajectory: the reward of each of its turns, and how it ended.

    `done`: by the environment's word; `turns`, `length`: cut off by that limit; `failed`: the environment did, and
    `rewards` are those before.
    """

    rewards: tuple[float, ...]
    ending: Ending


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished sample. Made by rollout (by placement where it gave up), eaten by score and placement.

    `newest_version` is the newest one announced when it finished: staleness at finish is measured against it. Times
    are in Unix milliseconds: when its last owner was free to start it, made its first token of it (None where it made
    none), and finished it. `episode` is there where an environment took part.
    """

    prompt: Prompt
    member: int
    lease: int
    attempt: int
    replica: int
    incarnation: int
    response: Response
    text: str
    version_spans: tuple[VersionSpan, ...]
    newest_version: PolicyVersion | None
    finish_reason: FinishReason
    error: str | None
    started_at: int
    first_token_at: int | None
    finished_at: int
    episode: Episode | None = None

    @property
    def trajectory_id(self) -> str:
        return trajectory_id(self.prompt.purpose, self.prompt.number, self.member)

    @property
    def policy_version(self) -> PolicyVersion | None:
        """The version that made the first token; None where nothing was generated."""
        return self.version_spans[0].version if self.version_spans else None


@dataclass(frozen=True, slots=True)
class RewardComponent:
    """One verifier's say: its value before weighting."""

    name: str
    value: float
    weight: float


@dataclass(frozen=True, slots=True)
class Experience:
    """A trajectory with its reward. Made by score, eaten by experience and evaluation; what exports hold.

    `error` says why a verifier failed; the reward then follows the configured policy, so that the group still
    completes.
    """

    trajectory: Trajectory
    reward: float
    components: tuple[RewardComponent, ...]
    error: str | None
    scored_at: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The end of a trajectory's story, written in the transaction that ends it.

    Made by experience and evaluation, eaten by placement. `tokens` of its response; `staleness` in versions, where it
    was looked at. `group_left`: its group leaves the buffer with it, so members that finish later are dropped.
    """

    trajectory_id: str
    group_size: int
    outcome: Outcome
    reason: str
    batch: int | None
    staleness: int | None
    tokens: int
    settled_at: int
    group_left: bool = False
