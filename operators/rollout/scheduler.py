"""The scheduler of an engine: first come, first served, within its slots and its KV capacity.

KV is allocated in blocks as responses grow, not reserved for the longest possible response. When the running requests
outgrow the capacity, the scheduler preempts the one started last: it returns to the head of the queue with its partial
response and later continues with the same tokens, because a draw depends on trajectory and position alone. The
scheduler has no tensors, so every engine that does its own batching can use it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from operators.rollout.engine import NOTHING_GENERATED, Completion, EngineStatus, PartialResponse, Request
from operators.rollout.kv_rows import KVRows, RowCopy, generation_limit, known_tokens
from operators.rollout.request_checks import check_request

R = TypeVar("R", bound=KVRows)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """At most `slots` requests at once, of `context` tokens each and `kv_capacity` tokens together."""

    slots: int
    context: int
    kv_capacity: int
    vocabulary: int
    headroom: int = 16
    """Free tokens per running request that an admission must leave, so that none is preempted at once."""
    block: int = 1
    """KV block size in tokens: a request holds whole blocks."""
    round_prefill: int | None = None
    """Maximum prefill tokens of one round, so that running requests do not wait for long; the first request of a round
    may have more."""

    def __post_init__(self) -> None:
        if min(self.slots, self.context - 1, self.vocabulary) < 1:
            raise ValueError(f"an engine needs at least 1 slot, a context of 2 tokens and a vocabulary of 1: {self}")
        if self.block < 1 or self.headroom < 0:
            raise ValueError(f"block must be at least 1 and headroom not negative: {self}")
        if self.kv_capacity < self.kv_held(self.context):
            raise ValueError(f"a KV capacity of {self.kv_capacity} tokens cannot hold one context of {self.context}")

    def kv_held(self, tokens: int) -> int:
        """KV tokens held by a request of `tokens` tokens."""
        return -(-tokens // self.block) * self.block

    def kv_held_by(self, lengths: np.ndarray) -> int:
        """KV tokens held together by requests of `lengths` (int64[n]) tokens."""
        blocks = lengths if self.block == 1 else -(-lengths // self.block) * self.block
        return int(blocks.sum())

    def surely_fit(self, requests: int, tokens: int) -> bool:
        """Whether `requests` requests of `tokens` tokens together fit the KV capacity whatever their blocks."""
        return tokens + requests * (self.block - 1) <= self.kv_capacity


class Scheduler(Generic[R]):
    """The waiting queue and the running `rows` of one engine.

    Rows move when others are removed. The engine applies the returned moves, in order, to what it keeps by row (the
    KV).
    """

    def __init__(self, config: SchedulerConfig, rows: R) -> None:
        self.config = config
        self.rows = rows
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: dict[str, Request] = {}
        self._ended: list[Completion] = []
        self.admitted: list[str] = []
        """Requests admitted in the last round."""
        self.prefill_limited = False
        """Whether `round_prefill` kept the last round from admitting more requests."""

    @property
    def idle(self) -> bool:
        """Whether no request runs, waits or has finished without being returned."""
        return not (self._waiting or self.rows.count or self._ended)

    @property
    def kv_used(self) -> int:
        """KV tokens held by the running rows."""
        return self.config.kv_held_by(self.rows.length[: self.rows.count])

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a row."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue `request`. Raises ValueError as `check` does."""
        self.check(request)
        self.add_checked(request)

    def add_checked(self, request: Request) -> None:
        """Queue a request that `check` has accepted."""
        reason = finished_reason(request, self.config.context)
        if reason is None or request.partial is None:
            self._waiting[request.trajectory_id] = request
        else:
            self._ended.append(Completion(request.trajectory_id, request.partial, reason))

    def check(self, request: Request) -> None:
        """Raise ValueError if `request` cannot run or its trajectory is already in the engine."""
        check_request(request, self.config.vocabulary, self.config.context)
        name = request.trajectory_id
        known = name in self._waiting or name in self._running
        if known or (self._ended and any(name == ended.trajectory_id for ended in self._ended)):
            raise ValueError(f"trajectory {name!r} is already in the engine")

    def take_finished(self) -> list[Completion]:
        """Requests that had already finished when they were added."""
        ended, self._ended = self._ended, []
        return ended

    def preempt(self) -> list[RowCopy]:
        """Return the requests started last to the queue until the others fit the KV capacity; returns the moves."""
        moves: list[RowCopy] = []
        if self.config.surely_fit(self.rows.count, self.rows.tokens):
            return moves
        while self.kv_used > self.config.kv_capacity:  # a single request always fits
            youngest = next(reversed(self._running))
            requests = self.rows.requests  # new rows are the last ones, so the youngest is near the end
            row = next(i for i in reversed(range(len(requests))) if requests[i].trajectory_id == youngest)
            resumed = replace(self._running[youngest], partial=self.rows.partial(row))
            moves += self.remove_rows([row])
            self._waiting[youngest] = resumed
            self._waiting.move_to_end(youngest, last=False)
        return moves

    def admit(self) -> range:
        """Start waiting requests in order while they fit; returns the new rows."""
        rows, capacity = self.rows, self.config.kv_capacity
        first = rows.count
        self.prefill_limited, self.admitted = False, []
        if not self._waiting or first == rows.slots:
            return range(first, first)
        growth = np.minimum(rows.limit[:first] - rows.generated[:first], self.config.headroom)
        planned = self.config.kv_held_by(rows.length[:first] + growth)
        most, prefill = self.config.round_prefill, 0
        while self._waiting and rows.count < rows.slots:
            request = next(iter(self._waiting.values()))
            known = known_tokens(request)
            left = generation_limit(request, self.config.context) - (known - len(request.prompt))
            planned += self.config.kv_held(known + min(left, self.config.headroom))
            if planned > capacity and rows.count:
                break
            if most is not None:
                prefill += rows.prefill_tokens(request)
                if prefill > most and rows.count > first:
                    self.prefill_limited = True
                    break
            del self._waiting[request.trajectory_id]
            self._running[request.trajectory_id] = request
            self.admitted.append(request.trajectory_id)
            rows.start(request)
        return range(first, rows.count)

    def running_rows(self, trajectory_ids: Collection[str]) -> dict[str, int]:
        """Trajectory id → row, for those of these requests that run."""
        wanted = set(trajectory_ids)
        rows = enumerate(self.rows.requests)
        return {request.trajectory_id: row for row, request in rows if request.trajectory_id in wanted}

    def remove_rows(self, rows: Iterable[int]) -> list[RowCopy]:
        """Remove `rows`; returns the moves of other rows."""
        removed = np.fromiter(rows, np.int64)
        for row in removed:
            del self._running[self.rows.requests[row].trajectory_id]
        return self.rows.remove(removed) if len(removed) else []

    def release(self, trajectory_ids: Collection[str]) -> tuple[dict[str, PartialResponse], list[RowCopy]]:
        """Stop these requests; returns their partial responses, and the moves of other rows."""
        released: dict[str, PartialResponse] = {}
        wanted = set(trajectory_ids)
        for ended in [ended for ended in self._ended if ended.trajectory_id in wanted]:
            released[ended.trajectory_id] = ended.generated
            self._ended.remove(ended)
        for trajectory_id in [name for name in dict.fromkeys(trajectory_ids) if name in self._waiting]:
            partial = self._waiting.pop(trajectory_id).partial
            released[trajectory_id] = NOTHING_GENERATED if partial is None else partial
        running = self.running_rows(wanted)
        for name, row in running.items():
            released[name] = self.rows.partial(row)
        return released, self.remove_rows(running.values())

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """The tokens of these requests from position `since[id]` on; unknown ids are left out."""
        found: dict[str, PartialResponse] = {}
        for name in [name for name in since if name in self._waiting]:  # not in an order of hashes
            partial = self._waiting[name].partial or NOTHING_GENERATED
            found[name] = PartialResponse(partial.token_ids[since[name] :], partial.logprobs[since[name] :])
        for row, request in enumerate(self.rows.requests):
            if request.trajectory_id in since:
                found[request.trajectory_id] = self.rows.partial(row, since[request.trajectory_id])
        return found

    def status(self, tokens_generated: int, others: int = 0) -> EngineStatus:
        """The present load; `others` is the number of further requests that the engine has outside the scheduler."""
        return EngineStatus(
            running=self.rows.count,
            waiting=len(self._waiting) + len(self._ended) + others,
            capacity=self.config.slots,
            kv_used=self.kv_used,
            kv_capacity=self.config.kv_capacity,
            tokens_generated=tokens_generated,
        )


def finished_reason(request: Request, context: int) -> str | None:
    """The finish reason of a resumed request that has already finished, else None.

    Its replica died before it could publish the trajectory.
    """
    if request.partial is None or not len(request.partial.token_ids):
        return None
    if int(request.partial.token_ids[-1]) in request.sampling.stop_token_ids:
        return "stop"
    return "length" if len(request.partial.token_ids) >= generation_limit(request, context) else None
