"""Running requests of an engine that draws tokens: their tokens and the sampling parameters of the next draw."""

from __future__ import annotations

import numpy as np

from operators.rollout.engine import Completion, PartialResponse, Request
from operators.rollout.kv_rows import KVRows, RowCopy
from operators.rollout.random_streams import stream_key
from operators.rollout.sampling_columns import NO_TOKEN, SamplingColumns


class TokenRows(KVRows):
    """Rows with their tokens, logprobs, sampling parameters and stop tokens."""

    def __init__(self, slots: int, context: int) -> None:
        super().__init__(slots, context)
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
        row = super().start(request)
        sampling, partial = request.sampling, request.partial
        if partial is not None and len(partial.token_ids):
            resumed = len(partial.token_ids)
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
        self._sampling = None
        return row

    @property
    def keys(self) -> np.ndarray:
        """Random stream keys of the running rows, uint64[count]."""
        return self._keys[: self.count]

    @property
    def sampling(self) -> SamplingColumns:
        """The sampling parameters of the running rows."""
        if self._sampling is None:
            columns = (column[: self.count] for column in (self._temperature, self._top_k, self._top_p))
            self._sampling = SamplingColumns.of(*columns)
        return self._sampling

    def known_tokens(self, row: int) -> np.ndarray:
        """Prompt and generated tokens of `row`, int64[length]."""
        return np.concatenate([self.requests[row].prompt, self._token_ids[row, : self.generated[row]]]).astype(np.int64)

    def recent(self, row: int, count: int) -> np.ndarray:
        """The last `count` tokens of `row`, or fewer if it has no more, those of its prompt included; int32[n]."""
        end = int(self.generated[row])
        own = self._token_ids[row, max(0, end - count) : end]
        prompt = self.requests[row].prompt
        before = prompt[max(0, len(prompt) - count + len(own)) :]
        return np.concatenate([before, own]).astype(np.int32)

    def record(self, token_ids: np.ndarray, logprobs: np.ndarray) -> dict[int, Completion]:
        """Append the next token of every running row; returns the completions of finished rows, by row.

        `token_ids` is int64[count], `logprobs` float32[count]. A row with NO_TOKEN fails and keeps its tokens so far.
        """
        stopped, full = self._append(token_ids, logprobs)
        return self._completions(stopped, full, token_ids == NO_TOKEN)

    def record_verified(
        self, draft: np.ndarray, token_ids: np.ndarray, logprobs: np.ndarray
    ) -> tuple[dict[int, Completion], np.ndarray]:
        """Append the drawn tokens of every row up to the first that is not that of its draft, or a stop token.

        `token_ids` int64[count, n] and `logprobs` float32[count, n] were drawn after each of `draft`, int64[count, n],
        whose first column has the last tokens. A row with NO_TOKEN gains nothing. Returns the completions by row, and
        the accepted tokens of each draft, int64[count].
        """
        count, width = token_ids.shape
        every = np.arange(count)
        agreed = np.cumprod(token_ids[:, :-1] == draft[:, 1:], 1).sum(1)
        stops = (self._stops[:count, None] == token_ids[:, :, None]).any(2)
        gained = np.minimum(agreed + 1, np.where(stops.any(1), stops.argmax(1) + 1, width))
        gained[(token_ids == NO_TOKEN).any(1)] = 0
        rows, steps = np.nonzero(np.arange(width) < gained[:, None])
        self._token_ids[rows, self.generated[rows] + steps] = token_ids[rows, steps]
        self._logprobs[rows, self.generated[rows] + steps] = logprobs[rows, steps]
        gains, last = gained > 0, np.maximum(gained - 1, 0)
        self.last_token[:count] = np.where(gains, token_ids[every, last], self.last_token[:count])
        self.generated[:count] += gained
        self.length[:count] += gained
        full = gains & (self.generated[:count] >= self.limit[:count])
        completions = self._completions(gains & stops[every, last], full, np.zeros(count, bool))
        return completions, np.where(gains, agreed, 0)

    def _completions(self, stopped: np.ndarray, full: np.ndarray, broken: np.ndarray) -> dict[int, Completion]:
        """The completions of finished rows, by row; `broken` rows, whose last token is NO_TOKEN, have failed."""
        completions = {}
        for row in np.flatnonzero(stopped | full | broken).tolist():
            trajectory_id = self.requests[row].trajectory_id
            if broken[row]:
                generated = self.partial(row, drop=1)
                error = f"the logits for token {len(generated.token_ids)} are not finite"
                completions[row] = Completion(trajectory_id, generated, "failed", error)
            else:
                reason = "stop" if stopped[row] else "length"
                completions[row] = Completion(trajectory_id, self.partial(row), reason)
        return completions

    def partial(self, row: int, start: int = 0, drop: int = 0) -> PartialResponse:
        end = self.generated[row] - drop
        return PartialResponse(self._token_ids[row, start:end].copy(), self._logprobs[row, start:end].copy())

    def remove(self, rows: np.ndarray) -> list[RowCopy]:
        self._sampling = None
        return super().remove(rows)

    def permute(self, order: np.ndarray) -> None:
        super().permute(order)
        for column in (self._token_ids, self._logprobs):
            column[: self.count] = column[order]
        self._sampling = None

    def _append(self, token_ids: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Append one token to every row; returns which rows stopped and which reached their limit, bool[count] each."""
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

    def _columns(self) -> tuple[np.ndarray, ...]:
        sampling = (self._temperature, self._top_k, self._top_p)
        return (*super()._columns(), self.last_token, self._keys, self._stops, *sampling)

    def _move(self, source: int, target: int) -> None:
        super()._move(source, target)
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
