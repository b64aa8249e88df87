"""PlaceTrajectories: the rollout manager. It alone mints leases and decides where each trajectory runs.

A restart rebuilds the state of trajectories from the records of placement (the inboxes), of replicas (progress,
hand-overs, trajectories) and from settled. Before it has read all records written before its start, it only fences.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from infra.clocks import wall_ms
from infra.kafka.clients import KafkaClients, SessionClients
from infra.kafka.fencing import CannotFence, fence
from infra.kafka.log_ends import EndsUnknown, log_ends
from infra.kafka.role_notes import NO_NOTES, ReadNotes, notes_reader
from infra.kafka.session_config import Partition
from infra.runners.step_metrics import phase
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, ReceivedRecord, Restored, ShardFold
from operators.io.newest_manifest import NewestManifest
from operators.io.repartition import LiveReplicas, Moved, Placed
from operators.placement.config import PlacementConfig
from operators.placement.dispatch import Dispatcher, Rounds
from operators.placement.moves import MoveCoordinator
from operators.placement.pauses import RunPause, WorkCounts
from operators.placement.prompt_numbers import PromptNumbers
from operators.placement.queue_metric import QueueMetric
from operators.placement.relay_chain import RelayChainManager
from operators.placement.replicas import ReplicaTable
from operators.placement.stage_groups import StageGroups
from operators.placement.tracking import FinishedTrajectory, TrajectoryTracker, finished_trajectories
from operators.placement.waiting_work import WaitingWork
from operators.placement.work_table import Leases, Owner
from schemas.block import Block
from schemas.bounds import fits_inbox
from schemas.records import (
    AssignmentRejected,
    Cancel,
    Pause,
    Progress,
    Prompt,
    RelayArrival,
    RelayChain,
    RelayStatus,
    ReplicaStatus,
    Reserve,
    Settled,
    StageGroup,
    StageStatus,
    WeightVersion,
)
from schemas.topics import CATALOGUE, PROGRESS, RELAY_CHAIN, REPLICAS, TRAJECTORIES, group_name

log = logging.getLogger(__name__)

PlacementOutput = Output | LiveReplicas | Placed | Moved | Cancel | Reserve | StageGroup
"""A record, or a decision that `RepartitionTrajectories` routes to the inbox of a replica."""


@dataclass(frozen=True)
class PlaceTrajectories:
    """`admitted` bounds the outstanding training trajectories (`Coverage`); `global_batch` of them are a batch.

    The group that crosses the bound is still admitted. Each rollout process hosts `hosted` replicas, in order of
    process number; there are inboxes for `replicas`. No fresh work follows version number `goal`.
    """

    config: PlacementConfig
    shard: ShardConfig
    partitions: int
    admitted: int
    hosted: int = 1
    replicas: int = 8
    global_batch: int = 1
    relay_schedule: str = "chain"
    goal: int = 0

    def restore(
        self,
        restored: Restored,
        clients: SessionClients | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = wall_ms,
    ) -> PlacementFold:
        """The state of a start; its process connects to Kafka with `clients` (default: those of the shard)."""
        run, kafka = self.shard.run, clients or KafkaClients(self.shard.client)

        def fence_process(process: int) -> None:
            fence(kafka, group_name(run, "rollout", process))

        def read_ends(places: Iterable[PartitionKey]) -> Ends:
            names = {Partition(CATALOGUE[place.topic].name(run), place.partition): place for place in places}
            ends = log_ends(kafka, f"{group_name(run, 'placement')}.ends", names, self.shard.transaction_timeout_s)
            return {names[place]: end for place, end in ends.items()}

        notes = notes_reader(run, kafka.observer, undecided=True)
        return PlacementFold(self, restored, fence_process, clock, now, read_ends, notes)


class PlacementFold(ShardFold):
    def __init__(
        self,
        step: PlaceTrajectories,
        restored: Restored,
        fence_process: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = wall_ms,
        read_ends: Callable[[Iterable[PartitionKey]], Ends] = lambda places: {},
        notes: ReadNotes = NO_NOTES,
    ) -> None:
        self._step, self._fence, self._clock, config = step, fence_process, clock, step.config
        self._now = now
        self._leases = Leases(restored.state.get("lease", 0))
        self._tracking = TrajectoryTracker(restored, step.partitions, config.max_attempts, self._leases, now, step.goal)
        self._waiting = WaitingWork(self._tracking.pending, self._tracking.is_known)
        self._pause = RunPause()
        self._replicas = ReplicaTable()
        self._ended = EndedOwners(read_ends)
        self._relays = RelayChainManager(config.heartbeat_timeout_s, step.relay_schedule, restored.state.get("chain"))
        self._moves = MoveCoordinator(
            config,
            self._tracking,
            self._replicas,
            self._leases,
            restored.start,
            now,
            has_no_fresh_work=lambda: self._dispatcher.has_no_fresh_work(),
            leads=lambda replica: self._stages.leads(replica),
        )
        self._stages = StageGroups(config, self._replicas, restored.start, now)
        self._newest_manifest = NewestManifest()
        self._rounds = Rounds(config.rules.round_batches * step.global_batch, restored.state.get("round", 0))
        self._dispatcher = Dispatcher(
            config,
            step.admitted,
            self._tracking,
            self._waiting,
            self._leases,
            self._rounds,
            self._moves.involves,
            now,
            is_paused=lambda: self._pause.active,
        )
        self._numbers = PromptNumbers(restored.state.get("prompts") if restored.state else {}, notes)
        self._ready = False
        self._started_at = self._folded_at = clock()
        self._queue = QueueMetric(self._started_at)
        self._emissions = 0

    # -- folding ------------------------------------------------------------------------------------------------------

    def fold(self, polled: Polled) -> list[PlacementOutput]:
        self._emissions += 1
        self._numbers.begin_poll()
        now = self._clock()
        if now - self._folded_at > self._step.config.heartbeat_timeout_s / 2:
            self._replicas.reset_timeouts(now)
            self._relays.reset_timeouts(now)
            self._started_at = now
        self._folded_at = now
        outputs: list[PlacementOutput] = [*self._tracking.dead_letters]
        self._tracking.dead_letters = []
        with phase("track trajectories"):
            for received in polled.records:
                outputs += self._handle(received, now)
        if not polled.caught_up:
            if REPLICAS.short_name not in polled.behind:
                with phase("recover lost ones"):
                    self._fence_silent(now)  # the open transaction of one may hide what is left to read
        else:
            if not self._ready:
                self._ready = True
                outputs += self._tracking.end_restart()
                self._moves.resume(now)
                self._started_at = now
            with phase("recover lost ones"):
                outputs += self._recover(now, polled.positions)
            with phase("plan moves"):
                outputs += self._stages.advance(now)
                outputs += self._moves.advance(now, self._stages.switches())
            with phase("dispatch"):
                alive = self._replicas.alive()
                outputs += self._dispatcher.dispatch(alive, self._emissions)
            counts = WorkCounts(self._tracking.table.unfinished_count(), self._waiting.rest_of_begun())
            outputs += self._pause.metric(counts, now, self._now())
            step = 0 if self._tracking.newest is None else self._tracking.newest.number
            outputs += self._queue.metric(self._dispatcher.waiting(), step, now, self._now())
            needed = self._dispatcher.needed_versions(alive)
            if (chain := self._relays.next_chain(now, self._tracking.newest, self._now(), needed)) is not None:
                outputs.append(Output(RELAY_CHAIN, self._step.shard.run, chain))
        # Cancels come first: they must not affect work that this emission assigns to the same replica.
        return self._with_live_replicas([*self._tracking.cancels.take(), *outputs])

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        tracking = self._tracking
        return Checkpoint(
            low_water=self._newest_manifest.low_water(tracking.low_water(positions)),
            ledger_from=tracking.table.oldest_emission(),
            state={
                **tracking.state(),
                "lease": self._leases.last,
                "round": self._rounds.left,
                "chain": self._relays.number,
                "prompts": self._numbers.state(),
            },
        )

    def _handle(self, received: ReceivedRecord, now: float) -> list[Output]:
        match received.record:
            case Prompt() as prompt:
                if prompt.purpose == "imported":
                    return [self._tracking.reject(received, f"{prompt.prompt_id}: imported prompts are not generated")]
                if (invalid := self._numbers.invalid_reason(prompt.purpose, prompt.number)) is not None:
                    return [self._tracking.reject(received, invalid)]
                if not fits_inbox(prompt, 0):
                    reason = f"{prompt.prompt_id}: the prompt is too large for an inbox"
                    return [self._tracking.reject(received, reason), *self._tracking.reject_prompt(prompt, reason)]
                self._waiting.add(received)
            case ReplicaStatus() as status:
                return self._record_heartbeat(received, status, now)
            case RelayStatus() as relay:
                self._relays.record_heartbeat(relay, now)
                self._stages.record_relay(relay)
            case RelayArrival() as arrival:
                self._stages.record_arrival(arrival, now)
            case StageStatus() as part:
                self._stages.record_stage(part, now)
            case RelayChain() as chain:
                if not self._relays.record_chain(chain, now):
                    reason = f"chain {chain.number} was not written by placement, whose last is {self._relays.number}"
                    return [self._tracking.reject(received, reason)]
            case Block() as trajectories:
                return self._tracking.finish(received, finished_trajectories(trajectories))
            case FinishedTrajectory() as finished:  # of a predicted run
                return self._tracking.finish(received, [finished])
            case Settled() as settled:
                return self._tracking.settle(received, settled)
            case Pause() as pause:
                self._pause.record(pause)
            case WeightVersion() as version:
                self._newest_manifest.record(received)
                self._tracking.cover(version)
                self._stages.announce(version)
            case Progress() as progress:
                return self._tracking.progress(received, progress, self._replicas.is_alive)
            case AssignmentRejected() as refused:
                return self._tracking.reject_assignment(received, refused)
        return []

    def _record_heartbeat(self, received: ReceivedRecord, status: ReplicaStatus, now: float) -> list[Output]:
        run, replicas = self._step.shard.run, self._step.replicas
        if status.run != run:
            return [self._tracking.reject(received, f"heartbeat of run {status.run!r}, not of {run!r}")]
        if not 0 <= status.replica < replicas:
            return [self._tracking.reject(received, f"replica {status.replica} has no inbox: there are {replicas}")]
        if (reason := self._replicas.record_heartbeat(status, now)) is not None:
            return [self._tracking.reject(received, reason)]
        return []

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _recover(self, now: float, positions: Mapping[PartitionKey, int]) -> list[Output]:
        """Fence replicas that timed out. The work of replicas that have ended is lost once all their records are read;
        it resumes elsewhere under a new lease.
        """
        self._fence_silent(now)
        table = self._tracking.table
        lost = self._ended.fully_read(filter(self._replicas.has_ended, table.owners()), positions)
        orphans = table.orphans(lost.__contains__)
        return [
            output
            for owned in orphans
            for output in self._tracking.lose(owned, crashed=self._replicas.has_crashed(owned.owner))
        ]

    def _fence_silent(self, now: float) -> None:
        """Fence replicas without a heartbeat for the time-out, which aborts their transactions."""
        timeout, table = self._step.config.heartbeat_timeout_s, self._tracking.table
        gone = self._replicas.timed_out(now, timeout)
        if now - self._started_at >= timeout:  # until then a replica without a heartbeat may be alive
            gone += [owner for owner in table.owners() if not self._replicas.is_known(owner)]
        try:
            for process in sorted({owner.replica // self._step.hosted for owner in gone}):
                self._fence(process)
            self._replicas.mark_fenced(gone)
        except CannotFence as error:
            log.warning("time-outs of replicas restart, since none can be fenced while Kafka is unavailable: %s", error)
            self._replicas.reset_timeouts(now)
            self._started_at = now

    def _with_live_replicas(self, outputs: list[PlacementOutput]) -> list[PlacementOutput]:
        """`outputs`, preceded by the live incarnations of the replicas for which they have decisions."""
        replicas = {replica for output in outputs if (replica := _replica_of(output)) is not None}
        alive = ((replica, self._replicas.incarnation(replica)) for replica in sorted(replicas))
        live = {replica: incarnation for replica, incarnation in alive if incarnation is not None}
        return [LiveReplicas(live), *outputs] if replicas else outputs


def _replica_of(output: PlacementOutput) -> int | None:
    """The replica that has to act on a decision; None for other outputs."""
    match output:
        case Placed():
            return output.assignment.replica
        case Moved():
            return output.release.replica
        case Cancel() | Reserve() | StageGroup():
            return output.replica
    return None


Ends = Mapping[PartitionKey, int]


class EndedOwners:
    """The last records of replicas that have ended: their work is not lost before placement has read them.

    The end of a replica and its last records are on different topics, so placement may read of the end first.
    `read_ends` returns the present ends of partitions that replicas write, open transactions included.
    """

    WRITTEN = frozenset(topic.short_name for topic in (TRAJECTORIES, PROGRESS))

    def __init__(self, read_ends: Callable[[Iterable[PartitionKey]], Ends]) -> None:
        self._read_ends = read_ends
        self._ends: dict[Owner, Ends] = {}
        """By ended owner of work: the ends of the topics after its last record."""

    def fully_read(self, ended: Iterable[Owner], positions: Ends) -> set[Owner]:
        """Those of `ended`, all ended owners of work, whose records are all before `positions`."""
        owners = set(ended)
        self._ends = {owner: ends for owner, ends in self._ends.items() if owner in owners}
        if new := owners - self._ends.keys():
            try:
                ends = self._read_ends(place for place in positions if place.topic in self.WRITTEN)
                self._ends |= dict.fromkeys(new, ends)
            except EndsUnknown as error:
                log.warning("the work of ended replicas waits, since the ends of topics are unknown: %s", error)
        return {
            owner for owner, ends in self._ends.items() if all(positions[place] >= end for place, end in ends.items())
        }
