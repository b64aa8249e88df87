"""The interface of an inference engine: load, submit, step, release, status.

An engine holds one complete weight version at a time and never mixes two in a trajectory (invariant 1). One thread
drives it: `step()` is one scheduling round (admit, prefill, decode one token of every running request) and returns the
requests that finished. No method blocks on the network.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from schemas.records import Conversation, Episode, PolicyVersion, Prompt, Sampling


class CannotGenerate(ValueError):
    """Each start of a rollout would fail in this way. The message names the setting, and a remedy."""


@dataclass(frozen=True, slots=True)
class KV:
    """Keys and values of a trajectory's first `tokens` tokens, prompt included: `data` in the engine's layout.

    If `data` has more tokens, `layout_tokens` is their number. Only an engine of the same kind with the same weights
    can use it; others ignore it. With `parts`, `data` is a list of manifests (`infra.transport.kv_transfer`), because
    the layers ran in several processes.
    """

    tokens: int
    data: memoryview
    layout_tokens: int = 0
    parts: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PartialResponse:
    """The generated part of one trajectory: token ids int32[n] and their behaviour logprobs float32[n] in nats.

    With `kv` an engine need not prefill prompt and partial response again. `loss_mask`, bool[n], is False for tokens of
    an environment, whose logprob is 0; None: the model drew all tokens.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    kv: KV | None = None
    loss_mask: np.ndarray | None = None

    @property
    def drawn(self) -> np.ndarray:
        """The loss mask, bool[n]: True for tokens that the model drew."""
        return np.ones(len(self.token_ids), bool) if self.loss_mask is None else self.loss_mask

    def since(self, start: int) -> PartialResponse:
        """The tokens from `start` on, without KV."""
        mask = None if self.loss_mask is None else self.loss_mask[start:]
        return PartialResponse(self.token_ids[start:], self.logprobs[start:], loss_mask=mask)


NOTHING_GENERATED = PartialResponse(np.zeros(0, np.int32), np.zeros(0, np.float32))
"""The response before the first token."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One trajectory to generate.

    `prompt` is int32[p]. A `partial` response is resumed by prefilling prompt + partial, or with its KV; its tokens
    count towards `sampling.max_new_tokens`. The draw for the token at `position` (counted from the first response
    token) is a function of (`sampling.seed`, `trajectory_id`, position) alone. `environment_prompt` is the prompt's
    record if an environment takes part; engines ignore it. With `keep_kv` the completion includes its KV, if the engine
    supports that.
    """

    trajectory_id: str
    prompt: np.ndarray
    sampling: Sampling
    partial: PartialResponse | None = None
    environment_prompt: Prompt | None = None
    keep_kv: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """A finished request: all tokens since its prompt, those of the resumed partial response included.

    `finish_reason` is `stop` (a stop token, which is the last token), `length` or `failed` (`error` has the reason).
    With an environment, `episode` has its rewards, and `stop` means that the environment was done.

    `conversations` has its messages, and says where in `generated` the context restarts. An agent's episode may have
    more tokens than are trained: then `positions`, int64[n], are those of `generated` among all tokens of the
    trajectory, `prompt` are the tokens before them, and `text` is the agent's answer. `conversation_rewards` has the
    agent's own report of each.
    """

    trajectory_id: str
    generated: PartialResponse
    finish_reason: str
    error: str | None = None
    episode: Episode | None = None
    prompt: np.ndarray | None = None
    positions: np.ndarray | None = None
    text: str | None = None
    conversations: tuple[Conversation, ...] = ()
    conversation_rewards: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The load of one engine (request counts, slots, KV use and capacity in tokens) and its totals so far.

    `model_seconds` is the CPU time of the stepping thread in steps: passes, draws, moves of KV; 0 if it is not counted.
    `drafted` and `accepted` are the tokens of verified drafts, 0 without speculation.
    """

    running: int
    waiting: int
    capacity: int
    kv_used: int
    kv_capacity: int
    tokens_generated: int
    model_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0


class Engine(Protocol):
    """One replica's generator."""

    @property
    def version(self) -> PolicyVersion | None:
        """The weight version loaded, None before the first."""

    def load(self, weights: Path, version: PolicyVersion) -> None:
        """Replace the weights in place with the safetensors file `weights`, rounded to the engine's precision.

        Raises RuntimeError while requests are running or waiting, ValueError if names or shapes do not match. An engine
        without weights accepts any file.
        """

    def submit(self, request: Request) -> None:
        """Queue a request; it starts when a slot and KV capacity are free.

        Raises ValueError for an empty prompt, a prompt that leaves no room for a token, unknown token ids, or the id of
        a trajectory that the engine has.
        """

    def step(self) -> Sequence[Completion]:
        """Run one round and return the requests that finished in it; an empty engine returns at once."""

    def take_started(self) -> Sequence[str]:
        """Requests whose first token was generated here since the last call, finished ones included."""

    def due(self) -> float:
        """Seconds until `step` has work or a result; infinite if it has none."""

    def release(self, trajectory_ids: Collection[str], *, with_kv: bool = False) -> dict[str, PartialResponse]:
        """Stop these requests and return their partial responses; unknown ids are left out.

        `with_kv`: with the KV of those that ran, if the engine supports that.
        """

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """The tokens of these requests from position `since[id]` on; the requests continue. Unknown ids are left
        out."""

    def status(self) -> EngineStatus:
        """The present load."""

    def close(self) -> None:
        """Free the engine's resources."""
