"""One replica: an engine, the assignments it was given, and the rule which weights it runs them under.

A trajectory starts and ends under one weight version. Weights change only while the engine is empty: to the version
that the next assignment names, or to the newest complete one. The schedule that interrupts is the exception: what runs
is taken out of the engine, and goes on under the newer weights with what it has.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from infra.store.errors import VersionGone
from infra.transport.kv_transfer import KVTransfers
from operators.rollout.config import RolloutConfig
from operators.rollout.engine import KV, Completion, Engine, PartialResponse
from operators.rollout.reservations import Reservations
from operators.rollout.running_request import RunningRequest, request_of
from schemas.bounds import fits_inbox
from schemas.records import (
    Assignment,
    AssignmentRejected,
    NextOwner,
    PolicyVersion,
    Progress,
    Prompt,
    Release,
    ReplicaState,
    Reserve,
    Trajectory,
)

log = logging.getLogger(__name__)

ReplicaEvent = Trajectory | AssignmentRejected | Progress | Assignment
"""What a replica says; an Assignment hands over, and goes with the Progress before it in one transaction."""


class Weights(Protocol):
    """Where a replica finds weights on its machine."""

    def versions(self) -> Collection[PolicyVersion]:
        """The complete versions."""

    def pin(self, version: PolicyVersion) -> AbstractContextManager[Path]:
        """The file of `version`, which stays while the context lasts. Raises VersionGone."""


class Replica:
    """Takes assignments, steps its engine, gives trajectories. `decode` turns response tokens into text; `check` raises
    ValueError for a prompt that its model cannot read.

    `changes` counts the changes that placement waits for. `kv_reused` counts the trajectories resumed with their
    transferred KV, `kv_recomputed` those whose transferred KV could not be used.
    """

    def __init__(
        self,
        index: int,
        incarnation: int,
        engine: Engine,
        weights: Weights,
        decode: Callable[[list[int]], str],
        now: Callable[[], int],
        config: RolloutConfig | None = None,
        *,
        interrupts: bool = False,
        kv_transfers: KVTransfers | None = None,
        check: Callable[[Prompt], None] = lambda prompt: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index, self.incarnation, self.engine = index, incarnation, engine
        self._weights, self._decode, self._now, self._clock = weights, decode, now, clock
        self._config, self._interrupts = config or RolloutConfig(), interrupts
        self._waiting: deque[Assignment] = deque()
        self._running: dict[str, RunningRequest] = {}
        self._kv_transfers, self._check = kv_transfers, check
        self._fetched: dict[str, tuple[int, Future[memoryview]]] = {}
        """KV on its way here or here, of what has not started: by trajectory, with the lease it came under."""
        self._reservations = Reservations(self._config.reserve_s)
        self._draining = False
        self._state: ReplicaState = "starting"
        self._steps = self._look_step = 0
        self._look_at = 0.0
        self.newest: PolicyVersion | None = None
        self.changes = self.kv_reused = self.kv_recomputed = 0

    @property
    def state(self) -> ReplicaState:
        return "draining" if self._draining and self._state == "running" else self._state

    @property
    def reserved(self) -> tuple[str, ...]:
        """The plans for whose trajectories it keeps room."""
        return self._reservations.plans

    def accept(self, assignment: Assignment) -> None:
        """Accept an assignment; the caller has checked that it is for this incarnation.

        Of a trajectory that is here already only the lease is news.
        """
        name = assignment.trajectory_id
        self._reservations.settle((name,), self._clock())
        running = self._running.get(name)
        if running is not None:
            if assignment.lease > running.assignment.lease:
                running.assignment = replace(running.assignment, lease=assignment.lease, attempt=assignment.attempt)
                running.told = 0 if assignment.partial is None else len(assignment.partial.token_ids)
            return
        for place, waiting in enumerate(self._waiting):
            if waiting.trajectory_id == name:
                self._waiting[place] = max(waiting, assignment, key=lambda each: each.lease)
                return
        self._waiting.append(assignment)
        if assignment.kv is not None and self._kv_transfers is not None:
            self._fetched[name] = assignment.lease, self._kv_transfers.fetch(assignment.kv)

    def cancel(self, leases: Mapping[str, int]) -> None:
        """Drop these trajectories, whether they run, wait or are still to come; not those under a later lease."""
        self._reservations.settle(leases, self._clock())
        self._waiting = deque(a for a in self._waiting if a.lease > leases.get(a.trajectory_id, 0))
        self._forget_kv()
        running = [name for name in leases if name in self._running]
        ended = [name for name in running if self._running[name].assignment.lease <= leases[name]]
        self.engine.release(ended)
        for name in ended:
            del self._running[name]

    def reserve(self, order: Reserve) -> None:
        """Keep these weights and the room that `order` asks for, if they are here."""
        status = self.engine.status()
        requests = len(self._running) + len(self._waiting) + self._reservations.requests + len(order.trajectory_ids)
        kv = status.kv_used + self._reservations.kv + order.kv
        if self.state != "running" or self.engine.version != order.policy_version:
            why = f"it is {self.state} under version {self.engine.version}"
        elif requests > status.capacity or kv > status.kv_capacity:
            why = f"{requests} requests of {kv} tokens are more than it has room for"
        else:
            self._reservations.grant(order.plan_id, order.trajectory_ids, order.kv, self._clock())
            self.changes += 1
            return
        log.info("replica %d keeps no room for plan %s: %s", self.index, order.plan_id, why)

    def hand_over(self, order: Release) -> list[ReplicaEvent]:
        """Stop the trajectories that `order` names and give each to its next owner; what is not here is passed over.

        The shortest first: they are computed anew in this order, and who is short soon goes on.
        """
        leases = dict(zip(order.trajectory_ids, order.leases, strict=False))
        leaving = [name for name in leases if self._may_leave(name, leases[name])]
        running = [name for name in leaving if name in self._running]
        released = self.engine.release(running, with_kv=self._kv_transfers is not None)
        lengths = {name: len(partial.token_ids) for name, partial in released.items()}
        words: list[ReplicaEvent] = []
        for name in sorted(leaving, key=lambda name: lengths.get(name, 0)):
            to = NextOwner(leases[name], order.destination, order.destination_incarnation)
            words += self._part_with(name, to, released.get(name))
        self._forget_kv()
        return words

    def drain(self) -> None:
        """Say that no fresh work is wanted any more; placement moves away what it can."""
        self._draining = True
        self.changes += 1

    def announce(self, version: PolicyVersion) -> None:
        """A weight version was published."""
        self.newest = max(filter(None, (self.newest, version)))

    @property
    def idle(self) -> bool:
        """Whether there is nothing to generate."""
        return not (self._running or self._waiting)

    def busy(self) -> bool:
        """Whether there is anything to do by now, and weights to do it under."""
        if self._running:
            return self.engine.due() <= 0
        return bool(self._waiting and self.engine.version is not None)

    def step(self) -> list[ReplicaEvent]:
        """Load weights if it is time to, start what can start, run one engine step, and tell what is to be told."""
        self._reservations.expire(self._clock())
        if not self._running:
            self._refresh()
        elif self._interrupts and self.newest != self.engine.version:
            self._interrupt()
        refused = self._start_waiting()
        if not self._running:
            return refused
        self._steps += 1
        completions = self.engine.step()
        for name in self.engine.take_started():
            if (running := self._running.get(name)) is not None and running.first_token_at is None:
                running.first_token_at = self._now()
        ended = [self._finish(completion) for completion in completions]
        return [*refused, *ended, *self._progress()]

    # -- weights ------------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Between two batches: the version that the next assignment names, else the newest that is complete here."""
        if self._reservations.plans:
            return  # what is to come needs the weights that are loaded
        named = self._waiting[0].policy_version if self._waiting else None
        here = self._weights.versions()
        if named not in here:  # then whoever names it is refused
            # A version may be announced before its bytes are complete on this machine, and gone again later.
            named = self._newest_here(here)
        if named is not None and named != self.engine.version:
            self._load(named)

    def _newest_here(self, here: Collection[PolicyVersion]) -> PolicyVersion | None:
        return max((v for v in here if self.newest is not None and v <= self.newest), default=None)

    def _load(self, version: PolicyVersion) -> None:
        self._state = "loading"
        try:
            with self._weights.pin(version) as file:
                self.engine.load(file, version)
            self.changes += 1
        except VersionGone as gone:
            log.warning("replica %d: weight version %s is gone: %s", self.index, version, gone)
        self._state = "running" if self.engine.version is not None else "starting"

    def _interrupt(self) -> None:
        """Go on under newer weights with all that runs, unless some of it is pinned to the present ones."""
        before, newer = self.engine.version, self._newest_here(self._weights.versions())
        pinned = any(running.assignment.prompt.policy_version is not None for running in self._running.values())
        if before is None or newer is None or newer <= before or pinned or self._reservations.plans:
            return
        partials = self.engine.release(list(self._running))
        self._load(newer)
        for name, running in self._running.items():
            partial = partials[name]
            running.spans = running.spans_of(len(partial.token_ids), before)
            request = request_of(running.assignment)
            self.engine.submit(replace(request, partial=partial if len(partial.token_ids) else None))

    # -- starting -----------------------------------------------------------------------------------------------------

    def _start_waiting(self) -> list[ReplicaEvent]:
        """Submit what may run under the loaded version; what names another waits until the engine is empty."""
        version = self.engine.version
        if version is None or not self._waiting:
            return []
        refused: list[ReplicaEvent] = []
        kept: deque[Assignment] = deque()
        here = None
        while self._waiting:
            assignment = self._waiting.popleft()
            if assignment.policy_version in (None, version):
                _, kv = self._fetched.get(assignment.trajectory_id, (0, None))
                if kv is not None and not kv.done():
                    kept.append(assignment)
                else:
                    refused += self._submit(assignment)
                continue
            here = self._weights.versions() if here is None else here
            if assignment.policy_version in here:
                kept.append(assignment)
            else:
                # Training may begin anew under other weights; who asks for these alone has nobody else to ask.
                retry = assignment.prompt.policy_version is None
                refused.append(self._refuse(assignment, f"weight version {assignment.policy_version} is gone", retry))
        self._waiting = kept
        return refused

    def _submit(self, assignment: Assignment) -> list[ReplicaEvent]:
        try:
            self._check(assignment.prompt)
            self.engine.submit(request_of(assignment, self._kv_of(assignment)))
        except ValueError as error:
            return [self._refuse(assignment, str(error), retry=False)]
        name = assignment.trajectory_id
        self._running[name] = RunningRequest.start(assignment, self._now(), self._clock(), self._steps)
        return []

    def _kv_of(self, assignment: Assignment) -> KV | None:
        """The KV that came along, if it is that of what is to be resumed under the weights loaded."""
        lease, fetched = self._fetched.pop(assignment.trajectory_id, (0, None))
        parcel = assignment.kv
        if parcel is None:
            return None
        error: BaseException | str | None = "other weights"
        if fetched is None or lease != assignment.lease:
            error = "it is not to be fetched"
        elif parcel.policy_version == self.engine.version:
            error = fetched.exception()
        if fetched is None or error is not None:
            self.kv_recomputed += 1
            log.info("replica %d computes %s anew: %s", self.index, assignment.trajectory_id, error)
            return None
        self.kv_reused += 1
        return KV(parcel.tokens, fetched.result())

    def _forget_kv(self) -> None:
        """Of what waits here no more."""
        if self._fetched:
            waiting = {assignment.trajectory_id for assignment in self._waiting}
            self._fetched = {name: fetched for name, fetched in self._fetched.items() if name in waiting}

    def _refuse(self, assignment: Assignment, reason: str, retry: bool) -> AssignmentRejected:
        return AssignmentRejected(
            assignment.trajectory_id, assignment.lease, self.index, self.incarnation, reason, retry
        )

    # -- telling ------------------------------------------------------------------------------------------------------

    def _finish(self, completion: Completion) -> Trajectory:
        running = self._running.pop(completion.trajectory_id)
        version = self.engine.version
        assert version is not None
        return running.finished(completion, version, self.newest, self._decode, self._now())

    def _progress(self) -> list[ReplicaEvent]:
        """What trajectories have gained of which placement has not been told for long."""
        clock, config = self._clock(), self._config
        if self._steps < self._look_step and clock < self._look_at:
            return []
        self._look_step = self._steps + max(1, config.progress_tokens // 8)
        self._look_at = clock + config.progress_s / 8
        return self._told(
            {
                name: running.told
                for name, running in self._running.items()
                if self._steps - running.told_step >= config.progress_tokens
                or clock - running.told_at >= config.progress_s
            },
            clock,
        )

    def report_progress(self) -> list[ReplicaEvent]:
        """Everything that placement has not been told, whatever it costs."""
        return self._told({name: running.told for name, running in self._running.items()}, self._clock())

    def _told(self, due: Mapping[str, int], clock: float) -> list[ReplicaEvent]:
        words: list[ReplicaEvent] = []
        for name, gained in self.engine.generated(due).items() if due else ():
            running = self._running[name]
            if len(gained.token_ids):
                words.append(running.progress(gained, self.engine.version, None, self._now()))
            running.told += len(gained.token_ids)
            running.told_at, running.told_step = clock, self._steps
        return words

    # -- handing over -------------------------------------------------------------------------------------------------

    def _may_leave(self, name: str, lease: int) -> bool:
        running = self._running.get(name)
        assignment = running.assignment if running is not None else self._waiting_for(name)
        if assignment is None or assignment.lease >= lease:
            return False
        # What its next owner could not be told stays; its limit is the most that it can have by now.
        return fits_inbox(assignment.prompt, assignment.prompt.sampling.max_new_tokens)

    def _waiting_for(self, name: str) -> Assignment | None:
        return next((waiting for waiting in self._waiting if waiting.trajectory_id == name), None)

    def _part_with(self, name: str, to: NextOwner, generated: PartialResponse | None) -> list[ReplicaEvent]:
        running = self._running.pop(name, None)
        now = self._now()
        if running is None or generated is None:
            assignment = running.assignment if running is not None else self._waiting_for(name)
            assert assignment is not None
            self._waiting = deque(waiting for waiting in self._waiting if waiting is not assignment)
            running = RunningRequest.start(assignment, now, 0.0, 0)
            known = request_of(assignment).partial
            generated = known if known is not None else PartialResponse(np.zeros(0, np.int32), np.zeros(0, np.float32))
        gained = generated.since(running.told)
        version = self.engine.version
        parcel, kv = None, generated.kv
        if kv is not None and self._kv_transfers is not None and version is not None:
            parcel = self._kv_transfers.offer(version, kv.tokens, kv.data)
        given = running.handed_over(to, generated, version, now, pinned=not self._interrupts, kv=parcel)
        return [running.progress(gained, version, to, now), given]
