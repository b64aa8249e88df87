"""What a rollout asks of an inference engine: load, submit, step, release, status.

One engine holds one complete weight version at a time and never mixes two in a trajectory (invariant 1). It is driven
by one thread: `step()` is one scheduling round (admit, prefill, decode one token for every running request) and
returns what finished in it. Nothing here blocks on the network.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from schemas.records import Episode, PolicyVersion, Prompt, Sampling


@dataclass(frozen=True, slots=True)
class KV:
    """Keys and values of a trajectory's first `tokens` tokens, prompt included: `data` as the engine lays them out.

    `data` may have more: then `layout_tokens` says how many. Of use to an engine of the same kind over the same weights
    alone; to any other it is nothing.
    """

    tokens: int
    data: memoryview
    layout_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PartialResponse:
    """What has been generated of one trajectory: token ids int32[n] and their behaviour logprobs float32[n] in nats.

    `kv`, where it is kept, spares an engine the computing of prompt and partial anew. `loss_mask`, bool[n], is False
    where an environment made a token, whose logprob is 0; None: all were drawn.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    kv: KV | None = None
    loss_mask: np.ndarray | None = None

    @property
    def drawn(self) -> np.ndarray:
        """The loss mask, bool[n]."""
        return np.ones(len(self.token_ids), bool) if self.loss_mask is None else self.loss_mask

    def since(self, start: int) -> PartialResponse:
        """Its tokens from `start` on, without KV."""
        mask = None if self.loss_mask is None else self.loss_mask[start:]
        return PartialResponse(self.token_ids[start:], self.logprobs[start:], loss_mask=mask)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One trajectory to generate.

    `prompt` is int32[p]. `partial`, where present, is resumed by prefilling prompt + partial, or with its KV; its
    tokens count towards `sampling.max_new_tokens`. The draw for the token at `position` (counted from the first
    completion token) is a function of (`sampling.seed`, `trajectory_id`, position) alone. `asked` is the prompt's
    record where an environment is to take part; engines know nothing of it. `keep_kv`: its completion is to have its
    KV, where the engine can give it.
    """

    trajectory_id: str
    prompt: np.ndarray
    sampling: Sampling
    partial: PartialResponse | None = None
    environment_prompt: Prompt | None = None
    keep_kv: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """A request that ended: everything generated since its prompt, a partial's tokens included.

    `finish_reason` is `stop` (a stop token, which is the last token), `length` or `failed` (then `error` says why).
    `episode` is what an environment gave, where one took part: then `stop` is that it was done.
    """

    trajectory_id: str
    generated: PartialResponse
    finish_reason: str
    error: str | None = None
    episode: Episode | None = None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Load of one engine: request counts, slots, KV use and capacity in tokens; and what it has done so far.

    `model_seconds` is the CPU time of the stepping thread in passes and draws; 0 where an engine does not count it.
    """

    running: int
    waiting: int
    capacity: int
    kv_used: int
    kv_capacity: int
    tokens_generated: int
    model_seconds: float = 0.0


class Engine(Protocol):
    """One replica's generator."""

    @property
    def version(self) -> PolicyVersion | None:
        """The weight version loaded, None before the first."""

    def load(self, weights: Path, version: PolicyVersion) -> None:
        """Replace the weights in place with the safetensors file `weights`, rounded to the engine's precision.

        Raises RuntimeError while requests are running or waiting, ValueError if names or shapes do not fit. An engine
        without weights of its own takes any file.
        """

    def submit(self, request: Request) -> None:
        """Queue a request; it starts when a slot and KV room are free.

        Raises ValueError for an empty prompt, one that leaves no room for a token, unknown token ids, or a known id.
        """

    def step(self) -> Sequence[Completion]:
        """Run one round and return what finished in it; an empty engine returns at once."""

    def take_started(self) -> Sequence[str]:
        """Requests that were given their first token here since this was asked last, those that ended included."""

    def due(self) -> float:
        """Seconds until `step` has something to do or to return; infinite where it never will."""

    def release(self, trajectory_ids: Collection[str], *, with_kv: bool = False) -> dict[str, PartialResponse]:
        """Stop these requests and return what each had generated; unknown ids are left out.

        `with_kv`: with the KV of those that ran, where the engine can give it.
        """

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """What these requests have generated from the position that `since` gives on; they go on, unknown ids are
        left out."""

    def status(self) -> EngineStatus:
        """The load right now."""

    def close(self) -> None:
        """Free what the engine holds."""
