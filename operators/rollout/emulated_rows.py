"""Running requests of an emulated engine: how many tokens each has, and which they would be."""

from __future__ import annotations

import numpy as np

from operators.rollout.engine import PartialResponse, Request
from operators.rollout.kv_rows import KVRows, RowCopy
from operators.rollout.random_streams import stream_key, uniforms
from operators.rollout.response_lengths import Lengths


class EmulatedRows(KVRows):
    """Rows whose ends are known when they start; tokens are made up where somebody asks for them.

    A request with stop tokens ends with the first of them after as many tokens as `lengths` says, unless its limit
    comes first; one without runs to its limit.
    """

    def __init__(self, slots: int, context: int, vocabulary: int, lengths: Lengths) -> None:
        super().__init__(slots, context)
        self._vocabulary, self._lengths = vocabulary, lengths
        self._ends = np.zeros(slots, np.int64)
        """`generated` at which a row ends, for its limit or a stop token: what the scheduler must not know of."""
        self._stops = np.zeros(slots, bool)
        """Whether it ends with a stop token."""
        self._sharing: dict[bytes, int] = {}
        """How many rows have each prompt."""
        self._prefill = 0

    def start(self, request: Request) -> int:
        self._prefill += self.prefill_tokens(request)
        row = super().start(request)
        end, self._stops[row] = int(self.limit[row]), False
        if request.sampling.stop_token_ids:
            length = self._lengths(request.sampling.seed, request.trajectory_id)
            end, self._stops[row] = min(end, length), length <= end
        # A partial made elsewhere may be longer than its answer is here: it ends with its next token.
        self._ends[row] = max(end, self.generated[row] + 1)
        prompt = request.prompt.tobytes()
        self._sharing[prompt] = self._sharing.get(prompt, 0) + 1
        return row

    def prefill_tokens(self, request: Request) -> int:
        """A prompt that a row has is there already, as in engines that cache prefixes."""
        shared = len(request.prompt) if request.prompt.tobytes() in self._sharing else 0
        return max(0, super().prefill_tokens(request) - shared)

    def take_prefill_tokens(self) -> int:
        """Tokens of the rows started since this was asked last, which are to be computed before the next round."""
        computed, self._prefill = self._prefill, 0
        return computed

    def advance(self, rounds: int) -> dict[int, str]:
        """Give every row so many tokens more; returns why those end that are at their end, by row."""
        count = self.count
        self.length[:count] += rounds
        self.generated[:count] += rounds
        ended = np.flatnonzero(self.generated[:count] >= self._ends[:count])
        return {row: "stop" if self._stops[row] else "length" for row in ended.tolist()}

    def left(self) -> np.ndarray:
        """Tokens that each row has still to get, int64[count]."""
        return self._ends[: self.count] - self.generated[: self.count]

    def partial(self, row: int, start: int = 0, drop: int = 0) -> PartialResponse:
        end = int(self.generated[row]) - drop
        stopped = bool(self._stops[row]) and end >= self._ends[row]
        return synthetic_response(self.requests[row], start, end, self._vocabulary, stopped)

    def remove(self, rows: np.ndarray) -> list[RowCopy]:
        for row in rows:
            prompt = self.requests[row].prompt.tobytes()
            self._sharing[prompt] -= 1
            if not self._sharing[prompt]:
                del self._sharing[prompt]
        return super().remove(rows)

    def _columns(self) -> tuple[np.ndarray, ...]:
        return (*super()._columns(), self._ends, self._stops)


def synthetic_response(request: Request, start: int, end: int, vocabulary: int, stopped: bool) -> PartialResponse:
    """Tokens `start` to `end` - 1 of `request` and their logprobs: what it was resumed with, then made-up ones.

    Each is a function of seed, trajectory and position; none is a stop token but the last one, if `stopped`.
    """
    resumed = request.partial
    known = 0 if resumed is None else min(end, len(resumed.token_ids))
    positions = np.arange(max(start, known), end)
    key = stream_key(request.sampling.seed, request.trajectory_id)
    draws = uniforms(np.full(len(positions), key, np.uint64), positions)
    stops = sorted(set(request.sampling.stop_token_ids))
    token_ids = (draws * max(1, vocabulary - len(stops))).astype(np.int32)
    for stop in stops:
        token_ids += token_ids >= stop
    if stopped and len(positions):
        token_ids[-1] = request.sampling.stop_token_ids[0]
    logprobs = (-2.0 * (draws * 1024.0 % 1.0)).astype(np.float32)
    if resumed is not None and start < known:
        token_ids = np.concatenate([resumed.token_ids[start:known], token_ids]).astype(np.int32)
        logprobs = np.concatenate([resumed.logprobs[start:known], logprobs]).astype(np.float32)
    return PartialResponse(token_ids, logprobs)
