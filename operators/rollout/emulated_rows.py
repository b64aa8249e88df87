"""Running requests of an emulated engine: the number of their tokens, and synthetic tokens on demand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from operators.rollout.engine import PartialResponse, Request
from operators.rollout.kv_rows import KVRows, RowCopy, generation_limit
from operators.rollout.random_streams import stream_key, uniforms
from operators.rollout.response_lengths import Lengths
from operators.rollout.tool_calls import ToolCall, ToolCalls


class EmulatedRows(KVRows):
    """Rows whose final length is known at the start; tokens are generated only when they are read.

    A request with stop tokens ends with the first stop token at the length given by `lengths`, or at its limit if that
    is smaller; one without stop tokens runs to its limit.
    """

    def __init__(
        self, slots: int, context: int, vocabulary: int, lengths: Lengths, tools: ToolCalls | None = None
    ) -> None:
        super().__init__(slots, context)
        self._vocabulary, self._lengths, self._tools = vocabulary, lengths, tools
        self._ends = np.zeros(slots, np.int64)
        """The value of `generated` at which a row ends, by its limit, a stop token or a tool call; hidden from the
        scheduler."""
        self._stops = np.zeros(slots, bool)
        """Whether a row ends with a stop token."""
        self.call_s = np.zeros(slots)
        """Duration of the tool call with which a row ends, float64[slots]; 0: it ends otherwise."""
        self._sharing: dict[bytes, int] = {}
        """The number of rows of each prompt."""
        self._prefill = self._known = 0
        self._first_end: int | None = None
        """Rounds until the first row ends; None: not known."""

    @property
    def tokens(self) -> int:
        return self._known

    def start(self, request: Request) -> int:
        self._prefill += self.prefill_tokens(request)
        row = super().start(request)
        end, self._stops[row] = self._end_of(request)
        generated, self.call_s[row] = int(self.generated[row]), 0.0
        if (call := next((each for each in self._calls(request, end) if each.tokens > generated), None)) is not None:
            end, self._stops[row], self.call_s[row] = call.tokens, False, call.seconds
        # A partial response of another engine may exceed the length given here: it ends with its next token.
        self._ends[row] = max(end, self.generated[row] + 1)
        self._known += int(self.length[row])
        if self._first_end is not None:
            self._first_end = min(self._first_end, int(self._ends[row] - self.generated[row]))
        prompt = request.prompt.tobytes()
        self._sharing[prompt] = self._sharing.get(prompt, 0) + 1
        return row

    def pending_call_s(self, request: Request) -> float:
        """Duration of the tool call that a resumed request has yet to make, emulated seconds; 0: none."""
        if self._tools is None or request.partial is None:
            return 0.0
        calls = self._calls(request, self._end_of(request)[0])
        return next((each.seconds for each in calls if each.tokens == len(request.partial.token_ids)), 0.0)

    def _end_of(self, request: Request) -> tuple[int, bool]:
        """The length of a response, and whether it ends with a stop token."""
        limit = generation_limit(request, self.context)
        if not request.sampling.stop_token_ids:
            return limit, False
        length = self._lengths(request.sampling.seed, request.trajectory_id)
        return min(limit, length), length <= limit

    def _calls(self, request: Request, length: int) -> Sequence[ToolCall]:
        tools = self._tools
        return () if tools is None else tools.of(request.sampling.seed, request.trajectory_id, length)

    def prefill_tokens(self, request: Request) -> int:
        """A prompt that a row shares is not computed again, as in engines with a prefix cache."""
        shared = len(request.prompt) if request.prompt.tobytes() in self._sharing else 0
        return max(0, super().prefill_tokens(request) - shared)

    def take_prefill_tokens(self) -> int:
        """Prefill tokens of the rows started since the last call, to compute before the next round."""
        computed, self._prefill = self._prefill, 0
        return computed

    def advance(self, rounds: int) -> dict[int, str]:
        """Advance every row by `rounds` tokens; returns the finish reason of each row that ends, "tool" for a call."""
        count = self.count
        self.length[:count] += rounds
        self.generated[:count] += rounds
        self._known += rounds * count
        if self._first_end is not None and rounds < self._first_end:
            self._first_end -= rounds
            return {}
        self._first_end = None
        ended = np.flatnonzero(self.generated[:count] >= self._ends[:count])
        return {row: self._reason(row) for row in ended.tolist()}

    def _reason(self, row: int) -> str:
        return "tool" if self.call_s[row] else "stop" if self._stops[row] else "length"

    def first_end(self) -> int:
        """Rounds until the first of one or more rows ends."""
        if self._first_end is None:
            self._first_end = int((self._ends[: self.count] - self.generated[: self.count]).min())
        return self._first_end

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
        self._known -= int(self.length[rows].sum())
        self._first_end = None
        return super().remove(rows)

    def _columns(self) -> tuple[np.ndarray, ...]:
        return (*super()._columns(), self._ends, self._stops, self.call_s)


def synthetic_response(request: Request, start: int, end: int, vocabulary: int, stopped: bool) -> PartialResponse:
    """Tokens `start` to `end` - 1 of `request` and their logprobs: those of its partial response, then synthetic ones.

    Each is a function of seed, trajectory and position. Only the last one is a stop token, if `stopped`.
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
