"""Trajectories, their rewards and their outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schemas.array_fields import Flags, Floats, TokenIds
from schemas.identity import trajectory_id
from schemas.records.prompts import Prompt
from schemas.records.versions import PolicyVersion

FinishReason = Literal["stop", "length", "failed"]
TokenSampler = Literal["laminar", "vllm"]
"""Draws that any engine repeats, or those of vLLM's own sampler."""

Ending = Literal["done", "turns", "length", "failed"]

Outcome = Literal["batched", "dropped", "failed", "evaluated", "imported"]

MAX_MESSAGES_CHARACTERS = 500_000
"""The messages of a trajectory's conversations are recorded up to this size."""


@dataclass(frozen=True, slots=True)
class Response:
    """Response tokens so far: ids, behaviour logprobs and loss mask, equally long.

    The loss mask is False for tokens of an environment.
    """

    token_ids: TokenIds
    logprobs: Floats
    loss_mask: Flags


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """`length` consecutive response tokens generated under `version`."""

    version: PolicyVersion
    length: int


@dataclass(frozen=True, slots=True)
class Episode:
    """A trajectory's episode in an environment: the reward of each turn, and how it ended.

    `done`: the environment ended it; `turns`, `length`: cut off by that limit; `failed`: the environment failed, and
    `rewards` are those before.
    """

    rewards: tuple[float, ...]
    ending: Ending


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation of an episode: the response tokens from `start` to the start of the next conversation.

    The first one begins with the trajectory's prompt, and `start` is 0; each later one begins anew at `start`, and the
    model has read nothing before it. Its first `prompt_tokens` tokens precede its first response. `messages` is JSON,
    the conversation in the shape of OpenAI's API; "" if it was too long to be recorded. With an environment there is
    one conversation, with the messages of the prompt (without a chat template its text, as one of the user), the turns
    as those of the assistant, and observations with the environment's role, or else as those of the user.
    """

    start: int
    prompt_tokens: int
    messages: str


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished sample. Written by rollout (by placement for one that it gave up), read by score and placement.

    `newest_version` is the newest one announced when it finished: staleness at finish is measured against it. Times are
    in Unix milliseconds: when its last owner was free to start it, generated its first token of it (None if it
    generated none), and finished it. `episode` is set if it ran in an environment. `conversations` are those of its
    episode that are trained: the response has their tokens, one conversation after another.
    `conversation_rewards` has an agent's own report of each; empty if it reported no rewards of conversations.
    `token_sampler` is the `rollout.token_sampler` of its owners; None if no model drew its tokens, or before version 6.
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
    conversations: tuple[Conversation, ...] = ()
    conversation_rewards: tuple[float, ...] = ()
    token_sampler: TokenSampler | None = None

    @property
    def trajectory_id(self) -> str:
        return trajectory_id(self.prompt.purpose, self.prompt.number, self.member)

    @property
    def policy_version(self) -> PolicyVersion | None:
        """The version that generated the first token; None if there is none."""
        return self.version_spans[0].version if self.version_spans else None


@dataclass(frozen=True, slots=True)
class RewardComponent:
    """One verifier's reward, before weighting."""

    name: str
    value: float
    weight: float


@dataclass(frozen=True, slots=True)
class Experience:
    """A trajectory with its reward. Written by score, read by experience and evaluation; exports contain it.

    `error` says why generation, the environment or a verifier failed: the reward is then `score.on_error`, or 0 and not
    trained, and the group still completes. `conversation_rewards` has the reward of each of the trajectory's
    conversations, and `reward` is their mean; it is empty if they all have `reward`.
    """

    trajectory: Trajectory
    reward: float
    components: tuple[RewardComponent, ...]
    error: str | None
    scored_at: int
    conversation_rewards: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome of a trajectory, written in the transaction that decides it.

    Written by experience and evaluation, read by placement. `tokens` are those of its response. `staleness` is in
    versions, None if it was not measured. `group_closed`: its group leaves the buffer with it, so members that finish
    later are dropped.
    """

    trajectory_id: str
    group_size: int
    outcome: Outcome
    reason: str
    batch: int | None
    staleness: int | None
    tokens: int
    settled_at: int
    group_closed: bool = False
