"""The turns of a response, told from its loss mask, and where a turn ends by its text. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from operators.rollout.engine import Partial

_BROKEN = "\N{REPLACEMENT CHARACTER}"


def turns_of(mask: np.ndarray) -> list[range]:
    """Where the model's turns stand in a response of loss mask `mask` (bool[n]): runs of what it drew.

    Two turns never touch, for what is observed between them is not empty.
    """
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    return [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def observations_of(mask: np.ndarray) -> list[range]:
    """What stands before each turn, which may be nothing before the first."""
    found, at = [], 0
    for turn in turns_of(mask):
        found.append(range(at, turn.start))
        at = turn.stop
    return found


def marked(generated: Partial, known: Partial, start: int = 0) -> Partial:
    """`generated`, the tokens of a response from `start` on, with their loss mask: what is not `known` was drawn."""
    count = len(generated.token_ids)
    mask = known.drawn[start : start + count]
    return replace(generated, loss_mask=np.concatenate([mask, np.ones(count - len(mask), bool)]))


def observed(known: Partial, token_ids: list[int]) -> Partial:
    """`known`, and `token_ids` after it that nobody drew; of these there is no KV."""
    count = len(token_ids)
    return Partial(
        np.concatenate([known.token_ids, np.array(token_ids, np.int32)]),
        np.concatenate([known.logprobs, np.zeros(count, np.float32)]),
        kv=known.kv,
        loss_mask=np.concatenate([known.drawn, np.zeros(count, bool)]),
    )


class Stops:
    """`strings` that end a turn, found in the text of its tokens."""

    def __init__(self, strings: tuple[str, ...], decode: Callable[[list[int]], str]) -> None:
        self.strings, self._decode = strings, decode
        self._last = {string[-1] for string in strings} | {_BROKEN}  # half a letter may be the end of one
        self._ends: dict[int, bool] = {}

    def may_end(self, token_ids: np.ndarray) -> bool:
        """Whether one of `token_ids` has what a string ends with: a quick look, at single tokens."""
        return any(map(self._has_end, token_ids.tolist()))

    def end(self, token_ids: np.ndarray) -> int | None:
        """How many of `token_ids`, a turn's, it takes until a string is there; None if none is."""
        turn: list[int] = token_ids.tolist()
        if not self._there(turn):
            return None
        return 1 + bisect.bisect_left(range(1, len(turn)), True, key=lambda count: self._there(turn[:count]))

    def _there(self, token_ids: list[int]) -> bool:
        text = self._decode(token_ids) if self.strings else ""
        return any(string in text for string in self.strings)

    def _has_end(self, token_id: int) -> bool:
        known = self._ends.get(token_id)
        if known is None:
            known = self._ends[token_id] = not self._last.isdisjoint(self._decode([token_id]))
        return known
