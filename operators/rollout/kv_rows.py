"""The running requests of an engine, as columns: entry i of every array belongs to row i of the batch.

Rows 0..count-1 are running and contiguous, so one step is a few array operations for any number of rows. When rows are
removed, the last ones move into their places; the caller applies the same moves to what it keeps by row (the KV).
Subclasses keep the generated tokens, or only their number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from operators.rollout.engine import PartialResponse, Request


class RowCopy(NamedTuple):
    """Copies the first `length` tokens of row `source` to row `target`."""

    source: int
    target: int
    length: int


class KVRows(ABC):
    """The running requests of one engine, at most `slots`, each of at most `context` tokens (prompt and completion)."""

    def __init__(self, slots: int, context: int) -> None:
        self.count = 0
        self.slots = slots
        self.context = context
        self.requests: list[Request] = []
        self.length = np.zeros(slots, np.int64)
        """Known tokens: prompt + generated."""
        self.generated = np.zeros(slots, np.int64)
        """Generated tokens, those of a resumed partial response included."""
        self.limit = np.zeros(slots, np.int64)
        """The value of `generated` at which a row reaches its length limit."""

    def start(self, request: Request) -> int:
        """Append a row for `request`; returns the row."""
        row = self.count
        self.requests.append(request)
        self.length[row] = known_tokens(request)
        self.generated[row] = known_tokens(request) - len(request.prompt)
        self.limit[row] = generation_limit(request, self.context)
        self.count += 1
        return row

    def prefill_tokens(self, request: Request) -> int:
        """Tokens to prefill before `request`, which has no row yet, can be decoded: all known ones except the last."""
        return known_tokens(request) - 1 - self.provided_kv_tokens(request)

    def provided_kv_tokens(self, request: Request) -> int:
        """Tokens of `request` whose KV was provided with it."""
        kv = None if request.partial is None else request.partial.kv
        return 0 if kv is None else min(kv.tokens, known_tokens(request) - 1)

    @property
    def tokens(self) -> int:
        """Known tokens of all rows, the newest token of each included."""
        return int(self.length[: self.count].sum())

    @abstractmethod
    def partial(self, row: int, start: int = 0, drop: int = 0) -> PartialResponse:
        """A copy of the generated tokens of `row` from position `start` on, without the last `drop` tokens."""

    def remove(self, rows: np.ndarray) -> list[RowCopy]:
        """Remove `rows` (distinct, any order); returns the moves that keep the others contiguous, in order."""
        left = self.count - len(rows)
        removed = set(rows.tolist())
        free = sorted(row for row in removed if row < left)
        moving = [row for row in range(left, self.count) if row not in removed]
        moves = [RowCopy(*move, int(self.length[move[0]])) for move in zip(moving, free, strict=True)]
        for source, target, _ in moves:
            self._move(source, target)
        del self.requests[left:]
        self.count = left
        return moves

    def permute(self, order: np.ndarray) -> None:
        """Reorder the rows: row i becomes the former row `order[i]`; `order` is a permutation, int64[count]."""
        self.requests = [self.requests[row] for row in order]
        for column in self._columns():
            column[: self.count] = column[order]

    def _columns(self) -> tuple[np.ndarray, ...]:
        return (self.length, self.generated, self.limit)

    def _move(self, source: int, target: int) -> None:
        """Move row `source` to the free row `target`."""
        self.requests[target] = self.requests[source]
        for column in self._columns():
            column[target] = column[source]


def known_tokens(request: Request) -> int:
    """The number of tokens of prompt and partial response."""
    return len(request.prompt) + (0 if request.partial is None else len(request.partial.token_ids))


def generation_limit(request: Request, context: int) -> int:
    """The maximum response tokens of `request`, where prompt and response share `context` tokens."""
    return min(request.sampling.max_new_tokens, context - len(request.prompt))
