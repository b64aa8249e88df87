"""The two ways in which vLLM draws tokens, as SamplingParams: `rollout.token_sampler`.

`laminar`: a logits processor draws each token as the other engines do (`sampling`, `random_streams`), so a moved
trajectory gets the same tokens. Its output row has the drawn token's logprob at that token and -inf elsewhere: greedy
sampling selects the token, and the logits that vLLM returns (`processed_logits`) contain the logprob, whichever process
computed it. The draw runs on the device and waits for nothing.

`vllm`: vLLM's own sampler, which restarts with each request, seeded with what the request is to draw next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from operators.rollout.engine import Request
from operators.rollout.random_streams import resumed_seed, stream_key, uniforms
from operators.rollout.sampling import draw
from operators.rollout.sampling_columns import SamplingColumns
from schemas.records import TokenSampler

NOT_FINITE = 1.0
"""Marks a row whose logits were not finite: no logprob is positive."""
EXTRA_ARGUMENT = "laminar"
"""The key of the draw parameters in `extra_args` of vLLM's SamplingParams."""
LOWEST_TEMPERATURE = 0.01
"""vLLM's sampler raises lower temperatures to this one; 0 is greedy."""


def draw_processors(token_sampler: TokenSampler) -> dict[str, Any]:
    """The engine arguments of vLLM by which draws of `token_sampler` report the logprobs of their distribution."""
    if token_sampler == "vllm":
        return {"logprobs_mode": "processed_logprobs"}
    return {"logprobs_mode": "processed_logits", "logits_processors": [DrawTokens]}


def sampling_params(request: Request, known: int, max_tokens: int, token_sampler: TokenSampler) -> SamplingParams:
    """The parameters of a vLLM request for at most `max_tokens` tokens of `request` after its first `known`."""
    sampling = request.sampling
    own: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": resumed_seed(sampling.seed, request.trajectory_id, known),
    }
    if token_sampler == "laminar":
        key = stream_key(sampling.seed, request.trajectory_id)
        drawn = [key, known, sampling.temperature, sampling.top_k, sampling.top_p]
        own = {"temperature": 0.0, "extra_args": {EXTRA_ARGUMENT: drawn}}  # the processor leaves only the drawn token
    return SamplingParams(
        **own,
        max_tokens=max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )


def check_temperature(request: Request, token_sampler: TokenSampler) -> None:
    """Raise ValueError for a temperature at which vLLM's sampler would draw from another distribution."""
    if token_sampler == "vllm" and 0 < request.sampling.temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"trajectory {request.trajectory_id!r}: vLLM's sampler draws at a temperature of at least "
            f"{LOWEST_TEMPERATURE}, not {request.sampling.temperature}: set rollout.token_sampler = 'laminar', or a "
            "higher prompts.temperature"
        )


@dataclass(slots=True)
class _Row:
    key: int
    first: int
    temperature: float
    top_k: int
    top_p: float
    generated: list[int]
    """vLLM's own list of the request's generated tokens, which vLLM appends to."""


class DrawTokens(LogitsProcessor):
    """Draws one token per row; rows without our argument are unchanged."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}
        self._columns: tuple[np.ndarray, np.ndarray, np.ndarray, SamplingColumns] | None = None

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply the changes of vLLM's batch: rows removed, added and moved, in this order."""
        if batch_update is None:
            return
        self._columns = None
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, generated in batch_update.added:
            self._rows.pop(index, None)
            if (row := _row(params, generated)) is not None:
                self._rows[index] = row
        for source, destination, direction in batch_update.moved:
            moving, replaced = self._rows.pop(source, None), self._rows.pop(destination, None)
            if moving is not None:
                self._rows[destination] = moving
            if direction == MoveDirectionality.SWAP and replaced is not None:
                self._rows[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw for each row; `logits` is float[rows, vocabulary]."""
        if not self._rows:
            return logits
        if self._columns is None:
            self._columns = self._as_columns()
        indices, keys, first, sampling = self._columns
        positions = first + [len(self._rows[index].generated) for index in indices.tolist()]
        others = len(indices) < len(logits)
        rows = torch.from_numpy(indices).to(logits.device, non_blocking=True) if others else slice(None)
        own = logits[rows]
        token_ids, logprobs = draw(own, sampling, uniforms(keys, positions))
        # Nothing is copied to the host, which would wait for the model.
        found = torch.where(logprobs.isnan(), NOT_FINITE, logprobs).float()
        own.fill_(-torch.inf).scatter_(1, token_ids[:, None], found.to(own.dtype)[:, None])
        if others:
            logits[rows] = own
        return logits

    def _as_columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, SamplingColumns]:
        # Sorted by row, so that no gather is needed if all rows are ours.
        rows = self._rows = dict(sorted(self._rows.items()))
        temperature = np.array([row.temperature for row in rows.values()])
        top_k = np.array([row.top_k for row in rows.values()], np.int64)
        top_p = np.array([row.top_p for row in rows.values()])
        return (
            np.array(list(rows), np.int64),
            np.array([row.key for row in rows.values()], np.uint64),
            np.array([row.first for row in rows.values()], np.int64),
            SamplingColumns.of(temperature, top_k, top_p),
        )


def _row(params: SamplingParams, generated: list[int]) -> _Row | None:
    argument = (params.extra_args or {}).get(EXTRA_ARGUMENT)
    if argument is None:
        return None
    key, first, temperature, top_k, top_p = argument
    return _Row(key, first, temperature, top_k, top_p, generated)
