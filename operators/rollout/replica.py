"""One replica: an engine, the assignments it was given, and the rule which weights it runs them under.

A trajectory starts and ends under one weight version: weights change only while the engine is empty, to the version
that the next assignment names, or to the newest complete one. An engine of two versions takes newer weights meanwhile,
for trajectories that begin then. The exception is a schedule that interrupts: it takes the running trajectories out of
the engine, loads newer weights and resumes them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from infra.transport.kv_transfer import KVTransfers
from operators.io.repartition import Placed, rejection
from operators.rollout.agent_episodes import AgentEngine
from operators.rollout.config import RolloutConfig
from operators.rollout.engine import Completion, Engine, PartialResponse
from operators.rollout.progress_schedule import ProgressSchedule
from operators.rollout.reservations import Reservations
from operators.rollout.running_request import RunningRequest, RunningRequests, known_response, request_of
from operators.rollout.waiting_assignments import IncomingKV, WaitingAssignments
from operators.rollout.weight_loader import WeightLoader, Weights
from schemas.bounds import fits_inbox
from schemas.records import (
    Assignment,
    AssignmentRejected,
    Cancel,
    Drain,
    EpisodeEnd,
    NextOwner,
    PolicyVersion,
    Progress,
    Prompt,
    Release,
    ReplicaState,
    Reserve,
    StageGroup,
    Trajectory,
    TurnEnded,
    TurnRequest,
    WeightVersion,
)

if TYPE_CHECKING:
    from operators.rollout.staged.replica_staging import ReplicaStaging  # imports torch

log = logging.getLogger(__name__)

ReplicaOrder = Assignment | Cancel | Reserve | Release | Drain | TurnRequest | EpisodeEnd | StageGroup
ReplicaEvent = Trajectory | AssignmentRejected | Progress | TurnEnded | Placed
"""What a replica publishes. A Placed hands a trajectory over, in one transaction with the Progress before it."""


class Replica:
    """Accepts assignments, steps its engine, returns trajectories.

    `decode` turns response tokens into text; `check` raises ValueError for a prompt that its model cannot read; `now`
    is in Unix milliseconds, `clock` in seconds; `may_load` says whether newer weights may be loaded while trajectories
    run, for those that begin then (None: never). `changes` counts what placement waits for, `progress` engine steps.
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
        staging: ReplicaStaging | None = None,
        may_load: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = config or RolloutConfig()
        self.index, self.incarnation, self.engine = index, incarnation, engine
        self._agents = engine if isinstance(engine, AgentEngine) else None
        self._decode, self._check, self._now, self._clock = decode, check, now, clock
        self._interrupts, self.kv_transfers, self._token_sampler = interrupts, kv_transfers, config.recorded_sampler
        self.staging, self._may_load = staging, may_load
        self._weights = WeightLoader(index, engine, weights, *(() if staging is None else (staging.may_load,)))
        self._waiting = WaitingAssignments(IncomingKV(index, kv_transfers))
        self._running = RunningRequests(clock)
        self.progress = ProgressSchedule(config.progress_tokens, config.progress_s)
        self._reservations = Reservations(config.reserve_s)
        self._draining = False
        self.changes = 0

    @property
    def state(self) -> ReplicaState:
        state = self._weights.state
        return "draining" if self._draining and state == "running" else state

    @property
    def reserved(self) -> tuple[str, ...]:
        """The plans for whose trajectories it reserves room."""
        return self._reservations.plans

    @property
    def kv(self) -> IncomingKV:
        """The KV of its assignments: how many were started with theirs, and how many were prefilled again."""
        return self._waiting.kv

    @property
    def idle(self) -> bool:
        """Whether there is nothing to generate."""
        return not (self._running or self._waiting)

    @property
    def running(self) -> RunningRequests:
        """What it generates."""
        return self._running

    def busy(self) -> bool:
        """Whether `step` has work to do now, and weights to do it under."""
        if self._running:
            return self.engine.due() <= 0
        return (loaded := self.engine.version) is not None and self._waiting.may_begin(loaded, self._weights.would_load)

    def turn_due(self) -> float:
        """Seconds until the turn of an agent may end; infinite if no agent waits."""
        return self.engine.due() if self._agents is not None and self._agents.in_turn() else math.inf

    # -- commands -----------------------------------------------------------------------------------------------------

    def accept(self, assignment: Assignment) -> None:
        """Queue an assignment; the caller has checked that it is for this incarnation.

        An assignment of a trajectory that runs or waits here only updates its lease.
        """
        name = assignment.trajectory_id
        self._reservations.remove((name,), self._clock())
        if (running := self._running.get(name)) is None:
            self._waiting.add(assignment)
        elif assignment.lease > running.assignment.lease:
            running.assignment = replace(running.assignment, lease=assignment.lease, attempt=assignment.attempt)
            running.reported = 0 if assignment.partial is None else len(assignment.partial.token_ids)

    def play(self, order: TurnRequest | EpisodeEnd) -> None:
        """Start a turn of an agent, or end its episode; ignored under an older lease and for a trajectory not here."""
        running = self._running.get(order.trajectory_id)
        assignment = self._waiting.find(order.trajectory_id) if running is None else running.assignment
        if self._agents is not None and assignment is not None and assignment.lease <= order.lease:
            self._agents.accept(order)

    def carry_out(self, order: ReplicaOrder) -> list[ReplicaEvent]:
        """Do what `order` says; nothing if it is for another incarnation. Returns the events of a hand-over."""
        if order.incarnation != self.incarnation:
            return []
        match order:
            case Assignment():
                self.accept(order)
            case Cancel():
                self.cancel(dict(zip(order.trajectory_ids, order.leases, strict=False)))
            case Reserve():
                self.reserve(order)
            case Release():
                return self.hand_over(order)
            case Drain():
                self.drain()
            case TurnRequest() | EpisodeEnd():
                self.play(order)
            case StageGroup():
                self.lead(order)
        return []

    def cancel(self, leases: Mapping[str, int]) -> None:
        """Drop these trajectories, whether they run, wait or are reserved; not those under a later lease."""
        self._reservations.remove(leases, self._clock())
        self._waiting.cancel(leases)
        running = [name for name in leases if name in self._running]
        cancelled = [name for name in running if self._running[name].assignment.lease <= leases[name]]
        self.engine.release(cancelled)
        for name in cancelled:
            self._running.pop(name)

    def reserve(self, order: Reserve) -> None:
        """Reserve the room that `order` requests and keep the present weights, if both are available."""
        if self.state != "running" or self.engine.version != order.policy_version:
            reason = f"it is {self.state} under version {self.engine.version}"
        else:
            held = len(self._running) + len(self._waiting)
            reason = self._reservations.grant(order, held, self.engine.status(), self._clock())
        if not reason:
            self.changes += 1
            return
        log.info("replica %d rejects the reservation for plan %s: %s", self.index, order.plan_id, reason)

    def hand_over(self, order: Release) -> list[ReplicaEvent]:
        """Stop the trajectories that `order` names and assign each to its next owner; those not here are skipped.

        The shortest comes first: the next owner prefills in this order, so short ones resume soon.
        """
        leases = dict(zip(order.trajectory_ids, order.leases, strict=False))
        leaving = [name for name in leases if self._can_hand_over(name, leases[name])]
        running = [name for name in leaving if name in self._running]
        released = self.engine.release(running, with_kv=self.kv_transfers is not None and not order.without_kv)
        lengths = {name: len(partial.token_ids) for name, partial in released.items()}
        events: list[ReplicaEvent] = []
        for name in sorted(leaving, key=lambda name: lengths.get(name, 0)):
            to = NextOwner(leases[name], order.destination, order.destination_incarnation)
            events += self._hand_over_one(name, to, released.get(name))
        return events

    def drain(self) -> None:
        """Request no more fresh work; placement moves away what it can."""
        self._draining = True
        if self.staging is not None:
            self.staging.draining = True
        self.changes += 1

    def announce(self, version: PolicyVersion, manifest: WeightVersion | None = None) -> None:
        """Record that a weight version was published; its parts can be used while it arrives if `manifest` is known."""
        self._weights.announce(version)
        if self.staging is not None and manifest is not None:
            self.staging.announce(manifest)

    def close(self) -> None:
        """Free the engine, and end the stage groups."""
        if self.staging is not None:
            self.staging.close()
        self.engine.close()

    def lead(self, group: StageGroup) -> None:
        """Form a stage group and lead it. Does nothing for an engine that cannot run in stages."""
        if self.staging is not None:
            self.staging.order(group)

    # -- one step: schedule, run, publish -----------------------------------------------------------------------------

    def step(self) -> list[ReplicaEvent]:
        """Schedule the assignments that can start, run one engine step, and return the events to publish."""
        rejected = self._schedule()
        if not self._running:
            return rejected
        completions = self._run()
        return [*rejected, *self._finish(completions), *self._report_turns(), *self._report_due_progress()]

    def report_progress(self) -> list[ReplicaEvent]:
        """Everything that placement does not know yet, whether it is due or not."""
        return self._report(self._running, self._clock())

    def _schedule(self) -> list[ReplicaEvent]:
        """Load weights if the engine may take others, and start the assignments that are ready; returns rejections."""
        self._reservations.expire(self._clock())
        ended: list[ReplicaEvent] = []
        if self.staging is not None:
            self.changes += self.staging.advance()
            ended = self._leave_broken_group(self.staging)
        if self._interrupts and self._running and self._weights.newest != self.engine.version:
            ended += self._interrupt()
        elif not self._reservations.plans and self._takes_weights():  # reserved trajectories need the loaded weights
            version = self._weights.would_load(self._waiting.next_version)
            self.changes += version is not None and self._load(version)
        loaded = self.engine.version
        if loaded is None or not self._waiting:
            return ended
        ready = self._waiting.take_ready(loaded, self._weights.available)
        now = self._now()  # the same for all: what PendingEvents takes for a burst was started at one time
        return [*ended, *filter(None, (self._start(assignment, loaded, now) for assignment in ready))]

    def _takes_weights(self) -> bool:
        """Whether the engine is empty, or may take newer weights while trajectories run."""
        if not self._running:
            return True
        return self._may_load is not None and self._weights.newest != self.engine.version and self._may_load()

    def _leave_broken_group(self, staging: ReplicaStaging) -> list[ReplicaEvent]:
        """Reject the requests of a group that computes nothing and will not be formed again: nothing else ends them."""
        if not (reason := staging.dead_end()):
            return []
        log.warning("replica %d leaves its group: %s", self.index, reason)
        self.engine.release(list(self._running))
        staging.leave()
        self.changes += 1
        return self._reject_running(reason)

    def _reject_running(self, reason: str) -> list[ReplicaEvent]:
        ended = [self._running.pop(name) for name in tuple(self._running)]
        return [rejection(running.assignment, reason, retry=True) for running in ended]

    def _load(self, version: PolicyVersion) -> bool:
        """Load `version`; a group that is led ends before. Returns whether it was loaded."""
        if (staging := self.staging) is None:
            return self._weights.load(version)
        staging.leave()
        with staging.member.claims.changing(version) as free:
            return free and self._weights.load(version)

    def _run(self) -> Sequence[Completion]:
        """Run one engine step."""
        self.progress.steps += 1
        completions = self.engine.step()
        for name in self.engine.take_started():
            if (running := self._running.get(name)) is not None and running.first_token_at is None:
                running.first_token_at = self._now()
        return completions

    def _finish(self, completions: Sequence[Completion]) -> list[ReplicaEvent]:
        return [
            self._running.pop(completion.trajectory_id).finished(
                completion, self._weights.newest, self._decode, self._now(), self._token_sampler
            )
            for completion in completions
        ]

    def _report_turns(self) -> list[ReplicaEvent]:
        """The turns of agents that have ended, after the progress with their tokens."""
        if self._agents is None or not (ended := self._agents.take_ended_turns()):
            return []
        here = [each.trajectory_id for each in ended if each.trajectory_id in self._running]
        events = self._report(here, self._clock())
        for each in ended:
            if (running := self._running.get(each.trajectory_id)) is not None:
                events.append(running.turn_ended(each, self._now()))
        return events

    def _report_due_progress(self) -> list[ReplicaEvent]:
        clock = self._clock()
        streaming = () if self._agents is None else self._agents.streaming()
        return self._report(self.progress.due(self._running, clock, streaming), clock)

    def _report(self, names: Iterable[str], clock: float) -> list[ReplicaEvent]:
        """Progress records of these running trajectories, for those that have gained tokens since the last one."""
        since = {name: self._running[name].reported for name in names}
        events: list[ReplicaEvent] = []
        for name, gained in self.engine.generated(since).items() if since else ():
            running = self._running[name]
            if len(gained.token_ids):
                events.append(running.progress(gained, None, self._now()))
            running.reported += len(gained.token_ids)
            running.reported_at, running.reported_step = clock, self.progress.steps
        return events

    def _start(self, assignment: Assignment, loaded: PolicyVersion, now: int) -> AssignmentRejected | None:
        """Submit `assignment` to the engine, or reject it."""
        if assignment.policy_version not in (None, loaded):
            # Training may restart under other weights; a prompt that is pinned to the version cannot.
            retry = assignment.prompt.policy_version is None
            return rejection(assignment, f"weight version {assignment.policy_version} is gone", retry=retry)
        try:
            self._check(assignment.prompt)
            self.engine.submit(request_of(assignment, self.kv.take(assignment, loaded)))
        except ValueError as error:
            return rejection(assignment, str(error), retry=False)
        running = RunningRequest.start(assignment, now, self._clock(), self.progress.steps, loaded)
        self._running[assignment.trajectory_id] = running
        return None

    def _interrupt(self) -> list[ReplicaEvent]:
        """Resume all running trajectories under newer weights, unless some are pinned; returns rejections."""
        before, newer = self.engine.version, self._weights.would_load(None)
        pinned = any(running.assignment.prompt.policy_version is not None for running in self._running.values())
        if before is None or newer is None or newer <= before or pinned or self._reservations.plans:
            return []
        partials = self.engine.release(list(self._running))
        self.changes += self._load(newer)
        if self.engine.version is None:  # its group has ended, and the newer version was evicted
            return self._reject_running(f"weight version {newer} is gone")
        for name, running in self._running.items():
            partial = partials[name]
            running.spans, running.version = running.spans_of(len(partial.token_ids)), self.engine.version
            request = request_of(running.assignment)
            self.engine.submit(replace(request, partial=partial if len(partial.token_ids) else None))
        return []

    # -- handing over -------------------------------------------------------------------------------------------------

    def _can_hand_over(self, name: str, lease: int) -> bool:
        running = self._running.get(name)
        assignment = running.assignment if running is not None else self._waiting.find(name)
        if assignment is None or assignment.lease >= lease:
            return False
        # A trajectory that does not fit the next owner's inbox stays; its limit bounds the tokens it can have by now.
        return fits_inbox(assignment.prompt, assignment.prompt.sampling.max_new_tokens)

    def _hand_over_one(self, name: str, to: NextOwner, generated: PartialResponse | None) -> list[ReplicaEvent]:
        running = self._running.pop(name, None)
        now = self._now()
        if running is None or generated is None:
            assignment = running.assignment if running is not None else self._waiting.find(name)
            assert assignment is not None
            self._waiting.remove(assignment)
            running = RunningRequest.start(assignment, now, 0.0, 0)
            generated = known_response(assignment)
        gained = generated.since(running.reported)
        version, kv, manifest = running.version, generated.kv, None
        if kv is not None and self.kv_transfers is not None and version is not None:
            manifest = self.kv_transfers.offer(version, kv.tokens, kv.data, parts=kv.parts)
        placed = running.handed_over(to, generated, now, pinned=not self._interrupts, kv=manifest)
        return [running.progress(gained, to, now), placed]
