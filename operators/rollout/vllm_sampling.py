"""The project's token draws inside vLLM: a logits processor that keeps only the drawn token, with its logprob.

vLLM's seeded sampling restarts with each request, so a moved trajectory would get other tokens. This processor draws
each token as the other engines do (`sampling`, `random_streams`). Its output row has the drawn token's logprob at that
token and -inf elsewhere: greedy sampling selects the token, and the logits that vLLM returns (`processed_logits`)
contain the logprob, whichever process computed it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from operators.rollout.random_streams import uniforms
from operators.rollout.sampling import sample
from operators.rollout.sampling_columns import NO_TOKEN, SamplingColumns

NOT_FINITE = 1.0
"""Marks a row whose logits were not finite: no logprob is positive."""
EXTRA_ARGUMENT = "laminar"


def draw_argument(key: int, first: int, temperature: float, top_k: int, top_p: float) -> dict[str, Any]:
    """`extra_args` of vLLM's SamplingParams: draw parameters, from position `first` of random stream `key` on."""
    return {EXTRA_ARGUMENT: [key, first, temperature, top_k, top_p]}


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
        rows = torch.from_numpy(indices).to(logits.device)
        own = logits[rows] if len(indices) < len(logits) else logits
        token_ids, logprobs = sample(own, sampling, uniforms(keys, positions))
        not_finite = token_ids == NO_TOKEN
        if not_finite.any():
            token_ids, logprobs = np.where(not_finite, 0, token_ids), np.where(not_finite, NOT_FINITE, logprobs)
        chosen = torch.from_numpy(token_ids).to(logits.device)[:, None]
        own.fill_(-torch.inf).scatter_(1, chosen, torch.from_numpy(logprobs.astype(np.float32)).to(own)[:, None])
        if own is not logits:
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
