"""Turns of agents: requests of an agent to the model, in an episode whose environment is the agent itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schemas.array_fields import TokenIds

AGENT = "agent"
"""The environment of prompts whose episodes are played by agents."""


Branches = Literal["last", "all", "tree"]
"""Which conversations of an episode are trained: that of the last turn; all, each token once; all, each one whole."""


@dataclass(frozen=True, slots=True)
class TokenRange:
    """The tokens `start` to before `stop` of an episode."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One request of an agent to the model. Written by gateway, read by rollout and gateway.

    The model reads the recorded tokens in `context`, then the new `token_ids`, and generates at most `max_tokens`
    tokens, up to a stop token of the prompt or one of `stop_strings`. The new tokens and the response are appended to
    the tokens of the episode, of which there are `start` before the turn. `turn_id` is a digest of what was requested:
    a repeated request has the same one. `messages` is JSON, the messages that the new tokens encode, and `tools` that
    of the request; `digest` stands for all its messages. With `stream` progress is published several times a second.
    `rewritten`: the chat template renders recorded messages otherwise than before; None in records of an earlier
    version. Rollout ignores a turn under an older `lease` than its own.
    """

    trajectory_id: str
    lease: int
    replica: int
    incarnation: int
    turn_id: str
    digest: str
    start: int
    context: tuple[TokenRange, ...]
    token_ids: TokenIds
    max_tokens: int
    stop_strings: tuple[str, ...]
    messages: str
    tools: str
    stream: bool
    written_at: int
    rewritten: bool | None = None


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The response to a TurnRequest is complete. Written by rollout, read by gateway.

    It follows the Progress with its tokens, in the same transaction. The turn has the tokens `start` to before `stop`
    of the episode, its new ones included.
    """

    trajectory_id: str
    lease: int
    replica: int
    incarnation: int
    turn_id: str
    start: int
    stop: int
    finish_reason: Literal["stop", "length", "failed"]
    error: str | None
    written_at: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A conversation of an episode: its tokens in order; the first `prompt_tokens` precede its first response."""

    prompt_tokens: int
    ranges: tuple[TokenRange, ...]


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """Ends an agent's episode. Written by gateway, read by rollout.

    `segments` are the conversations to train, that of the last turn first. Tokens that several of them have in common
    are trained once, with `branches` = "tree" in each. `messages` is a JSON list with the messages of each segment in
    the shape of OpenAI's API, null for those that are too long. `reward` is the agent's own report, None without one;
    `answer` is the text for verifiers, None for that of the response. With an `error` the episode fails. `rewards` are
    the agent's own report of each segment, None without one.
    """

    trajectory_id: str
    lease: int
    replica: int
    incarnation: int
    segments: tuple[Segment, ...]
    reward: float | None
    answer: str | None
    error: str | None
    written_at: int
    branches: Branches | None = None
    messages: str | None = None
    rewards: tuple[float, ...] | None = None


def extended(context: tuple[TokenRange, ...], start: int, stop: int) -> tuple[TokenRange, ...]:
    """`context` followed by the tokens `start` to before `stop`, as few ranges."""
    if start == stop:
        return context
    if context and context[-1].stop == start:
        return (*context[:-1], TokenRange(context[-1].start, stop))
    return (*context, TokenRange(start, stop))
