"""The engine that takes the time of another machine's, and makes its answers up.

It schedules as every engine here does (`Scheduler`), but a round takes what a roofline says, divided by `time_scale`.
The clock drives it: each call first brings it up to now, and as nothing changes between two events (a request ends, or
the KV overflows), the rounds between them are one leap. A round that has begun is not joined by what comes during it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from operators.rollout.emulated_arrivals import Arrivals
from operators.rollout.emulated_rows import EmulatedRows
from operators.rollout.emulation_config import EngineEmulation
from operators.rollout.engine import KV, Completion, EngineStatus, PartialResponse, Request
from operators.rollout.request_checks import check_loadable
from operators.rollout.response_lengths import Lengths
from operators.rollout.roofline import Roofline, StepPace
from operators.rollout.scheduler import Scheduler, SchedulerConfig
from schemas.records import PolicyVersion

STATUS_REFRESH_S = 0.1


class EmulatedEngine:
    """An `Engine` whose answers are as long as `lengths` says.

    `clock` is in seconds, of which each is `time_scale` emulated ones; loading weights takes `pull_s` emulated
    seconds, in which requests wait. `version` is what it has loaded at first. Where nothing ends `step` brings the load
    that `status` tells up to date every `status_refresh_s` seconds only: many replicas share a core.
    """

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
    ) -> None:
        rows = EmulatedRows(config.slots, config.context, config.vocabulary, lengths)
        self._scheduler = Scheduler(config, rows)
        self._arrivals = Arrivals(roofline.move_s)
        self._roofline, self._pull_s, self._scale, self._clock = roofline, pull_s, time_scale, clock
        self._version, self._status_refresh_s = version, status_refresh_s
        self._looked_at = -math.inf
        """When it was last brought up to date, by the clock."""
        self._done: list[Completion] = []
        self._at = clock() * time_scale
        """Emulated seconds; everything up to here has happened. Ahead of the clock while weights load."""
        self._round_ends: float | None = None
        """When the round ends that has begun; None between rounds."""
        self._event_at = math.inf
        """No request ends, none is sent back, and none that is new here has its first token before."""
        self._new = False
        """Whether something was submitted since requests were let in last."""
        self._tokens_generated = 0
        self._started: list[str] = []

    @property
    def version(self) -> PolicyVersion | None:
        """The weight version loaded, None before the first."""
        return self._version

    def load(self, weights: Path, version: PolicyVersion) -> None:
        """Be of `version` from now on; `weights` is not read. Raises RuntimeError while requests are here."""
        check_loadable(self.status(), version)
        self._version = version
        self._at = max(self._at, self._now(), self._round_ends or 0.0) + self._pull_s
        self._round_ends = None

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError as every engine does."""
        self._catch_up()
        name, carried = request.trajectory_id, self._scheduler.rows.provided_kv_tokens(request)
        if name in self._arrivals or any(name == done.trajectory_id for done in self._done):
            raise ValueError(f"trajectory {name!r} is here already")
        if carried:
            self._scheduler.check(request)
            self._arrivals.add(request, carried, self._now())
            self._foresee()
        else:
            self._scheduler.add(request)
            self._new = True
            self._event_at = min(self._event_at, self._at)

    def step(self) -> Sequence[Completion]:
        """Everything that has finished by now."""
        if self.due() <= 0 or self._clock() - self._looked_at >= self._status_refresh_s:
            self._catch_up()
        done, self._done = self._done, []
        return done

    def take_started(self) -> Sequence[str]:
        """Requests that were given their first token since this was asked last, those that ended included."""
        started, self._started = self._started, []
        return started

    def due(self) -> float:
        """Seconds until `step` may have something to return; infinite where it never will."""
        return 0.0 if self._done else max(0.0, (self._event_at - self._now()) / self._scale)

    def release(self, trajectory_ids: Collection[str], *, with_kv: bool = False) -> dict[str, PartialResponse]:
        """Stop these requests and return what each has generated by now, the KV without bytes; unknown ids are left
        out."""
        self._catch_up()
        rows = self._scheduler.running_rows(trajectory_ids) if with_kv else {}
        kv = {name: KV(int(self._scheduler.rows.length[row]) - 1, memoryview(b"")) for name, row in rows.items()}
        released, _ = self._scheduler.release(trajectory_ids)
        released |= {name: replace(released[name], kv=kv[name]) for name in kv}
        released |= self._arrivals.release(trajectory_ids)
        finished = [done for done in self._done if done.trajectory_id in trajectory_ids]
        self._done = [done for done in self._done if done.trajectory_id not in trajectory_ids]
        self._foresee()
        return released | {done.trajectory_id: done.generated for done in finished}

    def generated(self, since: Mapping[str, int]) -> dict[str, PartialResponse]:
        """What these requests have generated by now from the position that `since` gives on; unknown ids are left
        out, and so are those that have ended."""
        self._catch_up()
        return self._scheduler.generated(since) | self._arrivals.generated(since)

    def status(self) -> EngineStatus:
        """The load when it was last brought up to date; costs nothing and may be asked by any thread."""
        return self._scheduler.status(self._tokens_generated, others=len(self._done) + len(self._arrivals))

    def close(self) -> None:
        """Let go of what it holds; it cannot be used after, only closed again."""
        self.__dict__.clear()

    def _now(self) -> float:
        return self._clock() * self._scale

    def _catch_up(self) -> None:
        """Let everything happen that has by now."""
        self._looked_at = self._clock()
        now = self._looked_at * self._scale
        self._done += self._scheduler.take_finished()
        while self._at <= now:
            if self._round_ends is None:
                for request in self._arrivals.take(self._at):
                    self._scheduler.add(request)
                self._scheduler.preempt()
                self._scheduler.admit()
                self._new = False
                pace = self._pace(self._scheduler.rows.take_prefill_tokens())
                if pace is None:
                    self._at = min(now, self._arrivals.next_at)
                    if self._at < now:
                        continue
                    break
                most = self._until_event()
                if self._arrivals:  # what comes joins the first round that begins after
                    most = min(most, pace.rounds(self._arrivals.next_at - self._at, most) + 1)
                rounds = pace.rounds(now - self._at, most)
                if not rounds:
                    self._round_ends = self._at + pace.seconds(1)
                    continue
                self._at += pace.seconds(rounds)
                self._advance(rounds)
            elif self._round_ends <= now:
                self._at, self._round_ends = self._round_ends, None
                self._advance(1)
            else:
                break
        self._foresee()

    def _advance(self, rounds: int) -> None:
        rows = self._scheduler.rows
        self._started += self._scheduler.admitted
        self._scheduler.admitted = []
        self._tokens_generated += rounds * rows.count
        ended = rows.advance(rounds)
        for row, reason in ended.items():
            self._done.append(Completion(rows.requests[row].trajectory_id, rows.partial(row), reason))
        self._scheduler.remove_rows(ended)

    def _pace(self, prefill: int = 0) -> StepPace | None:
        """How fast the rounds go that begin now, after `prefill` tokens of new contexts are computed; None where
        nothing runs."""
        rows = self._scheduler.rows
        if not rows.count:
            return None
        return self._roofline.pace(rows.count, rows.tokens, prefill)

    def _until_event(self) -> int:
        """Rounds after which a row ends, comes in or the KV has overflown; the rows before are the same in each."""
        if self._scheduler.prefill_limited:
            return 1
        rows, config = self._scheduler.rows, self._scheduler.config
        first_end = int(rows.left().min())
        lengths = rows.length[: rows.count]
        fits, overflows = 0, first_end
        if config.kv_held_by(lengths + overflows) <= config.kv_capacity or rows.count == 1:
            return first_end
        while overflows - fits > 1:
            middle = (fits + overflows) // 2
            if config.kv_held_by(lengths + middle) <= config.kv_capacity:
                fits = middle
            else:
                overflows = middle
        return overflows

    def _foresee(self) -> None:
        """Compute when `step` or `take_started` may next return something, or a waiting request be admitted."""
        # Who arrives is let in between two rounds.
        joins_at = max(self._arrivals.next_at, self._at if self._round_ends is None else self._round_ends)
        if not self._scheduler.rows.count:
            self._event_at = self._at if self._scheduler.waiting else joins_at
            return
        if self._round_ends is not None and (self._new or self._scheduler.admitted):
            self._event_at = self._round_ends
            return
        rounds, start = self._until_event(), self._at
        if self._round_ends is not None:
            rounds, start = rounds - 1, self._round_ends
        pace = self._pace()
        assert pace is not None
        self._event_at = min(start + pace.seconds(rounds), joins_at)


def emulated_scheduling(
    slots: int, context: int, kv_capacity: int | None, emulation: EngineEmulation
) -> SchedulerConfig:
    """How an emulated engine schedules; without a KV capacity every slot has room for a whole context."""
    blocks = -(-context // emulation.block) * emulation.block
    return SchedulerConfig(
        slots,
        context,
        slots * blocks if kv_capacity is None else kv_capacity,
        emulation.vocabulary,
        block=emulation.block,
        round_prefill=emulation.round_prefill // emulation.stride,
    )
