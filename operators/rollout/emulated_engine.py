"""The emulated engine: it has the timing of another machine, and generates synthetic responses.

It uses the scheduler of all engines, but a round takes the time of a roofline model, divided by `time_scale`. The clock
drives it: each call first simulates the rounds up to now. Between two events (a request ends, or the KV overflows)
nothing changes, so the rounds between them are simulated in one jump. A request that arrives during a round joins the
next one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from pathlib import Path

from operators.rollout.emulated_rows import EmulatedRows
from operators.rollout.emulation_config import EngineEmulation
from operators.rollout.engine import KV, Completion, EngineStatus, PartialResponse, Request
from operators.rollout.request_checks import check_loadable
from operators.rollout.response_lengths import Lengths
from operators.rollout.roofline import Roofline, StepPace
from operators.rollout.scheduler import Scheduler, SchedulerConfig
from operators.rollout.tool_calls import ToolCalls
from schemas.records import PolicyVersion

STATUS_REFRESH_S = 0.1


class EmulatedEngine:
    """An `Engine` whose response lengths are given by `lengths`.

    One second of `clock` is `time_scale` emulated seconds. Loading weights takes `pull_s` emulated seconds, in which
    requests wait. `version` is the version loaded at first. While no request ends, `step` updates the status only every
    `status_refresh_s` seconds, because many replicas share a core.
    """

    _rows: type[EmulatedRows] = EmulatedRows

    def __init__(
        self,
        config: SchedulerConfig,
        roofline: Roofline,
        lengths: Lengths,
        *,
        pull_s: float = 0.0,
        time_scale: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        version: PolicyVersion | None = None,
        status_refresh_s: float = STATUS_REFRESH_S,
        tools: ToolCalls | None = None,
    ) -> None:
        rows = self._rows(config.slots, config.context, config.vocabulary, lengths, tools)
        self._scheduler = Scheduler(config, rows)
        self._arrivals = Arrivals(roofline.move_s)
        self._roofline, self._pull_s, self._scale, self._clock = roofline, pull_s, time_scale, clock
        self._status_refresh_s, self.version = status_refresh_s, version
        """The weight version loaded, None before the first."""
        self._advanced_at = -math.inf
        """The clock when the simulation was last advanced."""
        self._finished: list[Completion] = []
        self._simulated_until = clock() * time_scale
        """Emulated seconds up to which all is simulated; ahead of the clock while weights load."""
        self._round_ends: float | None = None
        """End of the round in progress; None between rounds."""
        self._next_event_at = math.inf
        """No request ends, is preempted or gets its first token here before this time."""
        self._new = False
        """Whether a request was submitted since the last admission."""
        self._tokens_generated = 0
        self._started: list[str] = []
        self._beside: EmulatedEngine | None = None
        """The other engine of the same device: a round takes the time of both."""

    def load(self, weights: Path, version: PolicyVersion) -> None:
        """Set the version; `weights` is not read. Raises RuntimeError while requests are running or waiting."""
        check_loadable(self.status(), version)
        self.version = version
        self._simulated_until = max(self._simulated_until, self._now(), self._round_ends or 0.0) + self._pull_s
        self._round_ends = None

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError as every engine does."""
        self.advance()
        rows, name = self._scheduler.rows, request.trajectory_id
        carried, call_s = rows.provided_kv_tokens(request), rows.pending_call_s(request)
        if name in self._arrivals or (self._finished and any(name == each.trajectory_id for each in self._finished)):
            raise ValueError(f"trajectory {name!r} is already in the engine")
        if carried or call_s:
            self._scheduler.check(request)
            self._arrivals.add(request, carried, self._now(), call_s)
            self._compute_next_event()
        else:
            self._scheduler.add(request)
            self._new = True
            self._next_event_at = min(self._next_event_at, self._simulated_until)

    def step(self) -> Sequence[Completion]:
        """The requests that have finished by now."""
        if self.due() <= 0 or self._clock() - self._advanced_at >= self._status_refresh_s:
            self.advance()
        done, self._finished = self._finished, []
        return done

    def take_started(self) -> Sequence[str]:
        """Requests whose first token was generated since the last call, finished ones included."""
        started, self._started = self._started, []
        return started

    def due(self) -> float:
        """Seconds until `step` may have a result; infinite if it has none."""
        return 0.0 if self._finished else max(0.0, (self._next_event_at - self._now()) / self._scale)

    def release(self, trajectory_ids: Collection[str], *, with_kv: bool = False) -> dict[str, PartialResponse]:
        """Stop these requests and return their partial responses, with KV that has no bytes; unknown ids are left
        out."""
        self.advance()
        rows = self._scheduler.running_rows(trajectory_ids) if with_kv else {}
        kv = {name: KV(int(self._scheduler.rows.length[row]) - 1, memoryview(b"")) for name, row in rows.items()}
        released, _ = self._scheduler.release(trajectory_ids)
        released |= {name: replace(released[name], kv=kv[name]) for name in kv}
        released |= self._arrivals.release(trajectory_ids)
        finished = [done for done in self._finished if done.trajectory_id in trajectory_ids]
        self._finished = [done for done in self._finished if done.trajectory_id not in trajectory_ids]
        self._compute_next_event()
        return released | {done.trajectory_id: done.generated for done in finished}

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """The tokens of these requests from position `since[id]` on; unknown and finished ids are left out."""
        self.advance()
        return self._scheduler.generated(since) | self._arrivals.generated(since)

    def status(self) -> EngineStatus:
        """The load when the simulation was last advanced; any thread may call it."""
        calls = self._arrivals.calls
        status = self._scheduler.status(
            self._tokens_generated, others=len(self._finished) + len(self._arrivals) - calls
        )
        return replace(status, running=status.running + calls)

    def close(self) -> None:
        """Free its resources; afterwards it can only be closed again."""
        self.__dict__.clear()

    def _now(self) -> float:
        return self._clock() * self._scale

    def advance(self) -> None:
        """Simulate all rounds up to now."""
        self._advanced_at = self._clock()
        now = self._advanced_at * self._scale
        self._finished += self._scheduler.take_finished()
        if self._round_ends is not None and self._round_ends > now and self._scheduler.rows.count:
            if self._new:  # it may join after the round that goes on
                self._next_event_at = self._round_ends
            return
        while self._simulated_until <= now:
            if self._round_ends is None:
                for request in self._arrivals.take(self._simulated_until):
                    self._scheduler.add_checked(request)
                self._scheduler.preempt()
                self._scheduler.admit()
                self._new = False
                pace = self._pace(self._scheduler.rows.take_prefill_tokens())
                if pace is None:
                    self._simulated_until = min(now, self._arrivals.next_at)
                    if self._simulated_until < now:
                        continue
                    break
                most = self._until_event()
                if self._arrivals:  # an arrival joins the next round
                    most = min(most, pace.rounds(self._arrivals.next_at - self._simulated_until, most) + 1)
                rounds = pace.rounds(now - self._simulated_until, most)
                if not rounds:
                    self._round_ends = self._simulated_until + pace.seconds(1)
                    continue
                self._simulated_until += pace.seconds(rounds)
                self._finish_rounds(rounds)
            elif self._round_ends <= now:
                self._simulated_until, self._round_ends = self._round_ends, None
                self._finish_rounds(1)
            else:
                break
        self._compute_next_event()
        if self._beside is not None:
            self._beside._compute_next_event()  # its rounds may take more or less time now

    def _finish_rounds(self, rounds: int) -> None:
        rows = self._scheduler.rows
        self._started += self._scheduler.admitted
        self._scheduler.admitted = []
        self._tokens_generated += rounds * rows.count
        ended = rows.advance(rounds)
        for row, reason in ended.items():
            if reason == "tool":
                self._call_tool(row)
            else:
                self._finished.append(self._completion(row, reason))
        self._scheduler.remove_rows(ended)

    def _call_tool(self, row: int) -> None:
        """The request of `row` continues with its KV when its call has ended."""
        rows = self._scheduler.rows
        kv = KV(int(rows.length[row]) - 1, memoryview(b""))
        resumed = replace(rows.requests[row], partial=replace(rows.partial(row), kv=kv))
        self._arrivals.call(resumed, self._simulated_until + float(rows.call_s[row]))

    def _completion(self, row: int, reason: str) -> Completion:
        rows = self._scheduler.rows
        return Completion(rows.requests[row].trajectory_id, rows.partial(row), reason)

    def _pace(self, prefill: int = 0) -> StepPace | None:
        """The pace of the next rounds, after a prefill of `prefill` tokens; None if no request runs."""
        pace = self._pace_alone(prefill)
        beside = None if self._beside is None else self._beside._pace_alone()
        if pace is None or beside is None:
            return pace
        return replace(pace, first_s=pace.first_s + beside.first_s, growth_s=pace.growth_s + beside.growth_s)

    def _pace_alone(self, prefill: int = 0) -> StepPace | None:
        rows = self._scheduler.rows
        return self._roofline.pace(rows.count, rows.tokens, prefill) if rows.count else None

    def _until_event(self) -> int:
        """Rounds until a row ends, a request is admitted or the KV overflows; until then the rows stay the same."""
        if self._scheduler.prefill_limited:
            return 1
        rows, config = self._scheduler.rows, self._scheduler.config
        first_end = rows.first_end()
        if rows.count == 1 or config.surely_fit(rows.count, rows.tokens + rows.count * first_end):
            return first_end
        lengths = rows.length[: rows.count]
        fits, overflows = 0, first_end
        if config.kv_held_by(lengths + overflows) <= config.kv_capacity:
            return first_end
        while overflows - fits > 1:
            middle = (fits + overflows) // 2
            if config.kv_held_by(lengths + middle) <= config.kv_capacity:
                fits = middle
            else:
                overflows = middle
        return overflows

    def _compute_next_event(self) -> None:
        """Compute when `step` or `take_started` may next return something, or a waiting request be admitted."""
        # Arrivals are admitted between two rounds.
        joins_at = max(self._arrivals.next_at, self._simulated_until if self._round_ends is None else self._round_ends)
        if not self._scheduler.rows.count:
            self._next_event_at = self._simulated_until if self._scheduler.waiting else joins_at
            return
        if self._round_ends is not None and (self._new or self._scheduler.admitted):
            self._next_event_at = self._round_ends
            return
        rounds, start = self._until_event(), self._simulated_until
        if self._round_ends is not None:
            rounds, start = rounds - 1, self._round_ends
        pace = self._pace()
        assert pace is not None
        self._next_event_at = min(start + pace.seconds(rounds), joins_at)


def share_device(one: EmulatedEngine, other: EmulatedEngine) -> None:
    """Let both take turns on one device: while both have requests, a round of each takes the time of both."""
    one._beside, other._beside = other, one


def emulated_scheduling(
    slots: int, context: int, kv_capacity: int | None, emulation: EngineEmulation
) -> SchedulerConfig:
    """The scheduling of an emulated engine; by default every slot has KV capacity for a whole context."""
    blocks = -(-context // emulation.block) * emulation.block
    return SchedulerConfig(
        slots,
        context,
        slots * blocks if kv_capacity is None else kv_capacity,
        emulation.vocabulary,
        block=emulation.block,
        round_prefill=emulation.round_prefill // emulation.stride,
    )


class Arrivals:
    """Requests that are not in the batch yet: their KV is in transfer, or they call a tool.

    Transfers take `token_s` emulated seconds per token over one link, in submission order, and overlap with the
    engine's rounds. Each request continues once its own KV has arrived.
    """

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s
        self._requests: dict[str, Request] = {}
        self._entries: dict[str, int] = {}
        """The number of the valid entry of `_times` of each request."""
        self._calling: set[str] = set()
        self._times: list[tuple[float, int, str]] = []
        """A heap of the times of arrival; entries of released requests stay until they are due."""
        self._added = 0
        self._link_free_at = -math.inf

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, trajectory_id: object) -> bool:
        return trajectory_id in self._requests

    @property
    def calls(self) -> int:
        """How many of them call a tool."""
        return len(self._calling)

    @property
    def next_at(self) -> float:
        """When the next request arrives; infinite if none is on its way."""
        while self._times and self._entries.get(self._times[0][2]) != self._times[0][1]:
            heappop(self._times)
        return self._times[0][0] if self._times else math.inf

    def add(self, request: Request, tokens: int, now: float, call_s: float = 0.0) -> None:
        """Start the transfer of `tokens` KV tokens of `request`, and then a tool call of `call_s` seconds."""
        self._link_free_at = max(self._link_free_at, now) + tokens * self._token_s
        self._put(request, self._link_free_at + call_s)
        if call_s:
            self._calling.add(request.trajectory_id)

    def call(self, request: Request, until: float) -> None:
        """`request` calls a tool `until` then."""
        self._put(request, until)
        self._calling.add(request.trajectory_id)

    def _put(self, request: Request, at: float) -> None:
        self._added += 1
        name = request.trajectory_id
        self._requests[name], self._entries[name] = request, self._added
        heappush(self._times, (at, self._added, name))

    def take(self, now: float) -> list[Request]:
        """The requests that have arrived by `now`."""
        arrived = []
        while self.next_at <= now:
            arrived.append(self._pop(heappop(self._times)[2]))
        return arrived

    def _pop(self, name: str) -> Request:
        self._calling.discard(name)
        del self._entries[name]
        return self._requests.pop(name)

    def release(self, trajectory_ids: Collection[str]) -> dict[str, PartialResponse]:
        """Cancel the transfers of these requests; returns their partial responses."""
        wanted = [name for name in dict.fromkeys(trajectory_ids) if name in self]  # not in an order of hashes
        return {name: _partial(self._pop(name)) for name in wanted}

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """The tokens of these requests from position `since[id]` on."""
        wanted = [name for name in since if name in self]
        return {name: _partial(self._requests[name]).since(since[name]) for name in wanted}


def _partial(request: Request) -> PartialResponse:
    assert request.partial is not None  # only partial responses have KV
    return request.partial
