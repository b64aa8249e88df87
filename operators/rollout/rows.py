"""What is running, as columns: row i of every array belongs to the request in row i of the batch.

Rows 0..count-1 are running and contiguous, so that one step is a few array operations however many rows there are.
When rows leave, the last ones move into the holes; the caller moves whatever else it keeps by row (the KV) the same
way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from operators.rollout.engine import Partial, Request
from operators.rollout.sampling import SamplingColumns, stream_key


class RowCopy(NamedTuple):
    """What row `source` keeps of its first `length` tokens goes to row `target`."""

    source: int
    target: int
    length: int


class Rows:
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
        self.last_token = np.zeros(slots, np.int64)
        self._temperature = np.zeros(slots)
        self._top_k = np.zeros(slots, np.int64)
        self._top_p = np.zeros(slots)
        self._sampling: SamplingColumns | None = None
        self._keys = np.zeros(slots, np.uint64)
        self._stops = np.full((slots, 1), -1, np.int64)
        self._token_ids = np.zeros((slots, context), np.int32)
        self._logprobs = np.zeros((slots, context), np.float32)

    def start(self, request: Request) -> int:
        """Put `request` behind the last row; returns its row."""
        row = self.count
        sampling, partial = request.sampling, request.partial
        resumed = 0 if partial is None else len(partial.token_ids)
        self.requests.append(request)
        self.length[row] = len(request.prompt) + resumed
        self.generated[row] = resumed
        self.limit[row] = generation_limit(request, self.context)
        if partial is not None and resumed:
            self._token_ids[row, :resumed] = partial.token_ids
            self._logprobs[row, :resumed] = partial.logprobs
            self.last_token[row] = partial.token_ids[-1]
        else:
            self.last_token[row] = request.prompt[-1]
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._keys[row] = stream_key(sampling.seed, request.trajectory_id)
        self._set_stops(row, sampling.stop_token_ids)
        self.count += 1
        self._sampling = None
        return row

    @property
    def keys(self) -> np.ndarray:
        """Keys of the running rows' uniforms, uint64[count]."""
        return self._keys[: self.count]

    @property
    def sampling(self) -> SamplingColumns:
        """How to draw for the running rows."""
        if self._sampling is None:
            columns = (column[: self.count] for column in (self._temperature, self._top_k, self._top_p))
            self._sampling = SamplingColumns.of(*columns)
        return self._sampling

    @property
    def tokens(self) -> int:
        """Tokens known over all rows: what the KV holds, the newest token of each row included."""
        return int(self.length[: self.count].sum())

    def known_tokens(self, row: int) -> np.ndarray:
        """Prompt and everything generated of `row`, int64[length]."""
        return np.concatenate([self.requests[row].prompt, self._token_ids[row, : self.generated[row]]]).astype(np.int64)

    def append(self, token_ids: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Add one token to every row; returns which rows stopped and which reached their limit, bool[count] each."""
        count = self.count
        generated = self.generated[:count]
        rows = np.arange(count)
        self._token_ids[rows, generated] = token_ids
        self._logprobs[rows, generated] = logprobs
        self.last_token[:count] = token_ids
        generated += 1
        self.length[:count] += 1
        stopped = (self._stops[:count] == token_ids[:, None]).any(1)
        return stopped, generated >= self.limit[:count]

    def partial(self, row: int, drop: int = 0) -> Partial:
        """A copy of what `row` has generated, without its last `drop` tokens."""
        end = self.generated[row] - drop
        return Partial(self._token_ids[row, :end].copy(), self._logprobs[row, :end].copy())

    def remove(self, rows: np.ndarray) -> list[RowCopy]:
        """Take `rows` (distinct, any order) out; returns the moves that kept the rest contiguous, in order."""
        left = self.count - len(rows)
        gone = set(rows.tolist())
        holes = sorted(row for row in gone if row < left)
        movers = [row for row in range(left, self.count) if row not in gone]
        moves = [RowCopy(*move, int(self.length[move[0]])) for move in zip(movers, holes, strict=True)]
        for source, target, _ in moves:
            self.requests[target] = self.requests[source]
            for column in self._columns():
                column[target] = column[source]
            self._move_history(source, target)
        del self.requests[left:]
        self.count = left
        self._sampling = None
        return moves

    def permute(self, order: np.ndarray) -> None:
        """Reorder the rows: row i becomes what row `order[i]` was. int64[count], a permutation."""
        self.requests = [self.requests[row] for row in order]
        for column in (*self._columns(), self._token_ids, self._logprobs):
            column[: self.count] = column[order]
        self._sampling = None

    def _columns(self) -> tuple[np.ndarray, ...]:
        sampling = (self._temperature, self._top_k, self._top_p)
        return (self.length, self.generated, self.limit, self.last_token, self._keys, self._stops, *sampling)

    def _move_history(self, source: int, target: int) -> None:
        end = self.generated[source]
        self._token_ids[target, :end] = self._token_ids[source, :end]
        self._logprobs[target, :end] = self._logprobs[source, :end]

    def _set_stops(self, row: int, stops: tuple[int, ...]) -> None:
        if len(stops) > self._stops.shape[1]:
            wider = np.full((self.slots, len(stops)), -1, np.int64)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
        self._stops[row] = -1
        self._stops[row, : len(stops)] = stops


def generation_limit(request: Request, context: int) -> int:
    """How many tokens `request` may have in all where prompt and completion share `context` tokens."""
    return min(request.sampling.max_new_tokens, context - len(request.prompt))
