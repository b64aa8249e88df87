"""Who runs and who waits: first come, first served, by slots and by KV tokens.

KV is counted by blocks of tokens as they come, not reserved for the longest answer a request may give. Where the
running requests outgrow it, the one started last goes back to the head of the queue with what it has; it gets the same
tokens again from there, since a draw depends on trajectory and position alone. The scheduler knows nothing of tensors,
so every engine that batches by itself can use it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from operators.rollout.engine import Completion, EngineStatus, PartialResponse, Request
from operators.rollout.kv_rows import KVRows, RowCopy, generation_limit, known_tokens
from operators.rollout.request_checks import check_request

R = TypeVar("R", bound=KVRows)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`slots` requests at once, `context` tokens each, `kv_capacity` tokens together."""

    slots: int
    context: int
    kv_capacity: int
    vocabulary: int
    headroom: int = 16
    """Tokens that every running request may still grow by when another is admitted, lest one be sent back at once."""
    block: int = 1
    """Tokens of KV that are taken at a time: a request holds whole blocks."""
    round_prefill: int | None = None
    """Tokens of new contexts that are computed in one round, lest those that run wait for long; the first of a round
    may have more."""

    def __post_init__(self) -> None:
        if min(self.slots, self.context - 1, self.vocabulary) < 1:
            raise ValueError(f"an engine needs a slot, a context of 2 tokens and a vocabulary: {self}")
        if self.block < 1 or self.headroom < 0:
            raise ValueError(f"a block is at least 1 token and headroom not negative: {self}")
        if self.kv_capacity < self.kv_held(self.context):
            raise ValueError(f"KV of {self.kv_capacity} tokens cannot hold one context of {self.context}")

    def kv_held(self, tokens: int) -> int:
        """Tokens of KV that a request of `tokens` tokens holds."""
        return -(-tokens // self.block) * self.block

    def kv_held_by(self, lengths: np.ndarray) -> int:
        """Tokens of KV that requests of `lengths` (int64[n]) tokens hold together."""
        blocks = lengths if self.block == 1 else -(-lengths // self.block) * self.block
        return int(blocks.sum())


class Scheduler(Generic[R]):
    """The waiting queue and the running `rows` of one engine.

    Rows move when others leave; whoever keeps anything by row (the KV) makes the moves that are returned, in order.
    """

    def __init__(self, config: SchedulerConfig, rows: R) -> None:
        self.config = config
        self.rows = rows
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: dict[str, Request] = {}
        self._ended: list[Completion] = []
        self.admitted: list[str] = []
        """Who was let in by the last round."""
        self.prefill_limited = False
        """Whether the last round would have let in more but for what their contexts take to compute."""

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or has ended without being returned."""
        return not (self._waiting or self.rows.count or self._ended)

    @property
    def kv_used(self) -> int:
        """Tokens of KV that the running rows hold."""
        return self.config.kv_held_by(self.rows.length[: self.rows.count])

    @property
    def waiting(self) -> int:
        """How many requests wait for a row."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue `request`. Raises ValueError as `check` does."""
        self.check(request)
        reason = finished_reason(request, self.config.context)
        if reason is None or request.partial is None:
            self._waiting[request.trajectory_id] = request
        else:
            self._ended.append(Completion(request.trajectory_id, request.partial, reason))

    def check(self, request: Request) -> None:
        """Raise ValueError for one that cannot run or whose id is here already."""
        check_request(request, self.config.vocabulary, self.config.context)
        name = request.trajectory_id
        here = name in self._waiting or name in self._running
        if here or any(name == ended.trajectory_id for ended in self._ended):
            raise ValueError(f"trajectory {name!r} is here already")

    def take_finished(self) -> list[Completion]:
        """Requests that had ended when they came."""
        ended, self._ended = self._ended, []
        return ended

    def preempt(self) -> list[RowCopy]:
        """Send the requests started last back to the queue until the rest fits in the KV; returns the moves."""
        moves: list[RowCopy] = []
        while self.kv_used > self.config.kv_capacity:  # one alone always fits
            youngest = next(reversed(self._running))
            row = next(i for i, request in enumerate(self.rows.requests) if request.trajectory_id == youngest)
            resumed = replace(self._running[youngest], partial=self.rows.partial(row))
            moves += self.remove_rows([row])
            self._waiting[youngest] = resumed
            self._waiting.move_to_end(youngest, last=False)
        return moves

    def admit(self) -> range:
        """Start whoever waits and fits, in order; returns the new rows."""
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
        """The rows of those of these requests that run."""
        wanted = set(trajectory_ids)
        rows = enumerate(self.rows.requests)
        return {request.trajectory_id: row for row, request in rows if request.trajectory_id in wanted}

    def remove_rows(self, rows: Iterable[int]) -> list[RowCopy]:
        """Take `rows` out, which have ended; returns the rows that moved."""
        leaving = np.fromiter(rows, np.int64)
        for row in leaving:
            del self._running[self.rows.requests[row].trajectory_id]
        return self.rows.remove(leaving) if len(leaving) else []

    def release(self, trajectory_ids: Collection[str]) -> tuple[dict[str, PartialResponse], list[RowCopy]]:
        """Stop these requests, wherever they are; returns what each had generated, and the rows that moved."""
        released: dict[str, PartialResponse] = {}
        wanted = set(trajectory_ids)
        for ended in [ended for ended in self._ended if ended.trajectory_id in wanted]:
            released[ended.trajectory_id] = ended.generated
            self._ended.remove(ended)
        for trajectory_id in wanted & self._waiting.keys():
            partial = self._waiting.pop(trajectory_id).partial
            released[trajectory_id] = _empty_partial() if partial is None else partial
        leaving = self.running_rows(wanted)
        for name, row in leaving.items():
            released[name] = self.rows.partial(row)
        return released, self.remove_rows(leaving.values())

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """What these requests have generated from the position that `since` gives on; unknown ids are left out."""
        found: dict[str, PartialResponse] = {}
        for name in since.keys() & self._waiting.keys():
            partial = self._waiting[name].partial or _empty_partial()
            found[name] = PartialResponse(partial.token_ids[since[name] :], partial.logprobs[since[name] :])
        for row, request in enumerate(self.rows.requests):
            if request.trajectory_id in since:
                found[request.trajectory_id] = self.rows.partial(row, since[request.trajectory_id])
        return found

    def status(self, tokens_generated: int, others: int = 0) -> EngineStatus:
        """The load right now; `others` more neither run nor wait here: they have ended, or are still to come."""
        return EngineStatus(
            running=self.rows.count,
            waiting=len(self._waiting) + len(self._ended) + others,
            capacity=self.config.slots,
            kv_used=self.kv_used,
            kv_capacity=self.config.kv_capacity,
            tokens_generated=tokens_generated,
        )


def _empty_partial() -> PartialResponse:
    return PartialResponse(np.zeros(0, np.int32), np.zeros(0, np.float32))


def finished_reason(request: Request, context: int) -> str | None:
    """Why a resumed request has ended already, None if it has not: its source died before it could say so."""
    if request.partial is None or not len(request.partial.token_ids):
        return None
    if int(request.partial.token_ids[-1]) in request.sampling.stop_token_ids:
        return "stop"
    return "length" if len(request.partial.token_ids) >= generation_limit(request, context) else None
