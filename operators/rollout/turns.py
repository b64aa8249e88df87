"""The turns of a response, told from its loss mask. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from operators.rollout.engine import PartialResponse


def turn_ranges(mask: np.ndarray) -> list[range]:
    """Where the model's turns stand in a response of loss mask `mask` (bool[n]): runs of what it drew.

    Two turns never touch, for what is observed between them is not empty.
    """
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    return [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def last_turn(mask: np.ndarray) -> range | None:
    """The turn with which a response of loss mask `mask` ends; None where it is nothing or ends as observed."""
    turns = turn_ranges(mask)
    return turns[-1] if turns and turns[-1].stop == len(mask) else None


def observation_ranges(mask: np.ndarray) -> list[range]:
    """What stands before each turn, which may be nothing before the first."""
    found, at = [], 0
    for turn in turn_ranges(mask):
        found.append(range(at, turn.start))
        at = turn.stop
    return found


def with_loss_mask(generated: PartialResponse, known: PartialResponse, start: int = 0) -> PartialResponse:
    """`generated`, the tokens of a response from `start` on, with their loss mask: what is not `known` was drawn."""
    count = len(generated.token_ids)
    mask = known.drawn[start : start + count]
    return replace(generated, loss_mask=np.concatenate([mask, np.ones(count - len(mask), bool)]))


def append_observation(known: PartialResponse, token_ids: list[int]) -> PartialResponse:
    """`known`, and `token_ids` after it that nobody drew; of these there is no KV."""
    count = len(token_ids)
    return PartialResponse(
        np.concatenate([known.token_ids, np.array(token_ids, np.int32)]),
        np.concatenate([known.logprobs, np.zeros(count, np.float32)]),
        kv=known.kv,
        loss_mask=np.concatenate([known.drawn, np.zeros(count, bool)]),
    )
