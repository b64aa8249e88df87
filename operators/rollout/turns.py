"""The turns of a response, derived from its loss mask. Pure functions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from operators.rollout.engine import PartialResponse


def turn_ranges(mask: np.ndarray) -> list[range]:
    """The ranges of the model's turns in a response with loss mask `mask` (bool[n]): runs of True.

    Two turns never touch, because the observation between them is not empty.
    """
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    return [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def last_turn(mask: np.ndarray) -> range | None:
    """The turn at the end of a response with loss mask `mask`; None if it is empty or ends with an observation."""
    turns = turn_ranges(mask)
    return turns[-1] if turns and turns[-1].stop == len(mask) else None


def observation_ranges(mask: np.ndarray) -> list[range]:
    """The range of the observation before each turn; the first may be empty."""
    found, at = [], 0
    for turn in turn_ranges(mask):
        found.append(range(at, turn.start))
        at = turn.stop
    return found


def with_loss_mask(generated: PartialResponse, known: PartialResponse, start: int = 0) -> PartialResponse:
    """`generated`, the tokens of a response from `start` on, with their loss mask: tokens beyond `known` were drawn."""
    count = len(generated.token_ids)
    mask = known.drawn[start : start + count]
    return replace(generated, loss_mask=np.concatenate([mask, np.ones(count - len(mask), bool)]))


def append_observation(known: PartialResponse, token_ids: list[int]) -> PartialResponse:
    """`known` followed by the observation `token_ids`, which the model did not draw; `known.kv` does not cover it."""
    count = len(token_ids)
    return PartialResponse(
        np.concatenate([known.token_ids, np.array(token_ids, np.int32)]),
        np.concatenate([known.logprobs, np.zeros(count, np.float32)]),
        kv=known.kv,
        loss_mask=np.concatenate([known.drawn, np.zeros(count, bool)]),
    )
