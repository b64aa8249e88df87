"""Who is running, as columns: row i of every array belongs to the request in row i of the batch.

Rows 0..count-1 are running and contiguous, so that one step is a few array operations however many rows there are.
When rows leave, the last ones move into the holes; the caller moves whatever else it keeps by row (the KV) the same
way. What has been generated is kept by subclasses: an engine may have tokens, or only know how many.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from operators.rollout.engine import PartialResponse, Request


class RowCopy(NamedTuple):
    """What row `source` keeps of its first `length` tokens goes to row `target`."""

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
        """Tokens known: prompt + generated."""
        self.generated = np.zeros(slots, np.int64)
        """Tokens generated, those of a resumed partial included."""
        self.limit = np.zeros(slots, np.int64)
        """`generated` at which a row ends for its length."""

    def start(self, request: Request) -> int:
        """Put `request` behind the last row; returns its row."""
        row = self.count
        self.requests.append(request)
        self.length[row] = known_tokens(request)
        self.generated[row] = known_tokens(request) - len(request.prompt)
        self.limit[row] = generation_limit(request, self.context)
        self.count += 1
        return row

    def prefill_tokens(self, request: Request) -> int:
        """Tokens to compute before `request`, not yet here, is given its next one: the last that is known is not."""
        return known_tokens(request) - 1 - self.provided_kv_tokens(request)

    def provided_kv_tokens(self, request: Request) -> int:
        """Tokens of `request` whose KV came along."""
        kv = None if request.partial is None else request.partial.kv
        return 0 if kv is None else min(kv.tokens, known_tokens(request) - 1)

    @property
    def tokens(self) -> int:
        """Tokens known over all rows: what the KV holds, the newest token of each row included."""
        return int(self.length[: self.count].sum())

    @abstractmethod
    def partial(self, row: int, start: int = 0, drop: int = 0) -> PartialResponse:
        """A copy of what `row` has generated from position `start` on, without its last `drop` tokens."""

    def remove(self, rows: np.ndarray) -> list[RowCopy]:
        """Take `rows` (distinct, any order) out; returns the moves that kept the rest contiguous, in order."""
        left = self.count - len(rows)
        gone = set(rows.tolist())
        holes = sorted(row for row in gone if row < left)
        movers = [row for row in range(left, self.count) if row not in gone]
        moves = [RowCopy(*move, int(self.length[move[0]])) for move in zip(movers, holes, strict=True)]
        for source, target, _ in moves:
            self._move(source, target)
        del self.requests[left:]
        self.count = left
        return moves

    def permute(self, order: np.ndarray) -> None:
        """Reorder the rows: row i becomes what row `order[i]` was. int64[count], a permutation."""
        self.requests = [self.requests[row] for row in order]
        for column in self._columns():
            column[: self.count] = column[order]

    def _columns(self) -> tuple[np.ndarray, ...]:
        return (self.length, self.generated, self.limit)

    def _move(self, source: int, target: int) -> None:
        """Let row `target`, which is free, be what row `source` was."""
        self.requests[target] = self.requests[source]
        for column in self._columns():
            column[target] = column[source]


def known_tokens(request: Request) -> int:
    """Tokens of prompt and partial."""
    return len(request.prompt) + (0 if request.partial is None else len(request.partial.token_ids))


def generation_limit(request: Request, context: int) -> int:
    """How many tokens `request` may have in all where prompt and completion share `context` tokens."""
    return min(request.sampling.max_new_tokens, context - len(request.prompt))
