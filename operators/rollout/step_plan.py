"""The plan of one step: which tokens go through the model, and where their keys and values are stored.

Prefill stores the KV of all known tokens of a request except the last one; the decode pass computes the last one of
every row, new rows included. So each step draws one token for every row. Equal prompts (the samples of a group) are
computed once and stored in all rows that share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Decode:
    """The last known token of rows: `token_ids` and `positions`, int64[rows]; row i is KV row `first_row` + i."""

    token_ids: np.ndarray
    positions: np.ndarray
    first_row: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Verify:
    """Consecutive decode steps of the same rows, computed together: `token_ids` and `positions`, int64[steps, rows].

    The first step is that of a `Decode`; the others have the tokens of a draft. Behind the end of a row's draft its
    tokens mean nothing, and positions may repeat.
    """

    token_ids: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """A block of distinct contexts, right-padded with zeros: `token_ids` int64[contexts, width].

    Token `source[i]` (of the flattened block) is stored at KV (`row[i]`, `position[i]`), int64[writes] each: padding is
    not stored, and a context shared by several rows is stored in each. The first token has position `start`; if that is
    not 0 the block has one context, whose row already has the KV of the tokens before.
    """

    token_ids: np.ndarray
    source: np.ndarray
    row: np.ndarray
    position: np.ndarray
    start: int = 0


def plan_prefill(contexts: Sequence[np.ndarray], rows: Sequence[int], max_tokens: int) -> list[Prefill]:
    """Blocks that compute `contexts[i]` (int64[n], n ≥ 1) for KV row `rows[i]`.

    A block has at most `max_tokens` tokens, padding included (more only for a single context), and is at most half
    padding.
    """
    sharing: dict[bytes, list[int]] = {}
    distinct: dict[bytes, np.ndarray] = {}
    for context, row in zip(contexts, rows, strict=True):
        key = context.tobytes()
        sharing.setdefault(key, []).append(row)
        distinct.setdefault(key, context)
    blocks: list[list[bytes]] = []
    for key in sorted(distinct, key=lambda key: -len(key)):
        if blocks:
            width = len(distinct[blocks[-1][0]])
            fits = (len(blocks[-1]) + 1) * width <= max_tokens
            if fits and 2 * len(distinct[key]) >= width:
                blocks[-1].append(key)
                continue
        blocks.append([key])
    return [_block([distinct[key] for key in block], [sharing[key] for key in block]) for block in blocks]


def plan_extension(token_ids: np.ndarray, row: int, start: int) -> Prefill:
    """A block that computes `token_ids` (int64[n], n ≥ 1) for KV row `row`, which has the KV of the `start` tokens
    before them."""
    steps = np.arange(len(token_ids))
    return Prefill(token_ids[None], steps, np.full(len(token_ids), row), steps + start, start)


def _block(contexts: Sequence[np.ndarray], rows: Sequence[Sequence[int]]) -> Prefill:
    width = len(contexts[0])
    token_ids = np.zeros((len(contexts), width), np.int64)
    source, row, position = [], [], []
    for i, (context, targets) in enumerate(zip(contexts, rows, strict=True)):
        length = len(context)
        token_ids[i, :length] = context
        steps = np.arange(length)
        source.append(np.tile(steps + i * width, len(targets)))
        row.append(np.repeat(np.asarray(targets), length))
        position.append(np.tile(steps, len(targets)))
    return Prefill(token_ids, np.concatenate(source), np.concatenate(row), np.concatenate(position))
