"""PlaceTrajectories: the rollout manager. It alone mints leases and decides where each trajectory runs.

A restart rebuilds what is known of trajectories from what placement wrote (the inboxes), what replicas wrote (progress,
hand-overs, trajectories) and what was settled; it decides nothing before it has seen all that had been written when it
started.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from infra.kafka.fencing import CannotFence, fence
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, ReceivedRecord, Restored
from operators.placement.config import PlacementConfig
from operators.placement.dispatch import Dispatcher
from operators.placement.leases import Leases
from operators.placement.moving import Moving
from operators.placement.prompt_numbers import PromptNumbers
from operators.placement.relay_chain import RelayChainKeeper
from operators.placement.replicas import ReplicaTable
from operators.placement.rounds import Rounds
from operators.placement.tracking import Tracking
from operators.placement.waiting import WaitingWork
from schemas.bounds import fits_inbox
from schemas.records import (
    AssignmentRejected,
    Progress,
    Prompt,
    RelayChain,
    RelayStatus,
    ReplicaStatus,
    Settled,
    Trajectory,
    WeightVersion,
)
from schemas.topics import INBOX, RELAY_CHAIN, group_name

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlaceTrajectories:
    """`admitted` bounds the training trajectories dispatched and not settled, of which `global_batch` make a batch.

    The group that crosses the bound is still admitted. A rollout process hosts `hosted` replicas, those of process 0
    first; there are inboxes for `replicas`.
    """

    config: PlacementConfig
    shard: ShardConfig
    partitions: int
    admitted: int
    hosted: int = 1
    replicas: int = 8
    global_batch: int = 1
    relay_schedule: str = "chain"

    def restore(self, restored: Restored) -> _Placing:
        return _Placing(self, restored, self._fence)

    def _fence(self, process: int) -> None:
        fence(self.shard.client, group_name(self.shard.run, "rollout", process))


class _Placing:
    def __init__(
        self,
        step: PlaceTrajectories,
        restored: Restored,
        fence_process: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = lambda: time.time_ns() // 10**6,
    ) -> None:
        self._step, self._fence, self._clock, config = step, fence_process, clock, step.config
        self._now = now
        self._leases = Leases(restored.state.get("lease", 0))
        self._tracking = Tracking(restored, step.partitions, config.max_attempts, self._leases, now)
        self._waiting = WaitingWork(self._tracking.pending, self._tracking.is_known)
        self._replicas = ReplicaTable()
        self._relays = RelayChainKeeper(config.heartbeat_timeout_s, step.relay_schedule, restored.state.get("chain"))
        self._moving = Moving(
            config,
            self._tracking,
            self._replicas,
            self._leases,
            restored.start,
            now,
            nothing_fresh=lambda: self._dispatcher.nothing_fresh(),
        )
        self._rounds = Rounds(config.rules.round_batches * step.global_batch, restored.state.get("round", 0))
        self._dispatcher = Dispatcher(
            config,
            step.admitted,
            self._tracking,
            self._waiting,
            self._leases,
            self._rounds,
            self._moving.involves,
            now,
        )
        self._numbers = PromptNumbers(restored.state.get("prompts") if restored.state else {})
        self._ready = False
        self._started_at = self._turned_at = clock()
        self._emissions = 0

    # -- folding ------------------------------------------------------------------------------------------------------

    def fold(self, polled: Polled) -> list[Output]:
        self._emissions += 1
        now = self._clock()
        if now - self._turned_at > self._step.config.heartbeat_timeout_s / 2:
            self._replicas.forgive(now)
            self._relays.forgive(now)
            self._started_at = now
        self._turned_at = now
        outputs, self._tracking.rejections = self._tracking.rejections, []
        for received in polled.records:
            outputs += self._take(received, now)
        if polled.caught_up:
            if not self._ready:
                self._ready = True
                self._tracking.forget_released()
                self._moving.resume(now)
                self._started_at = now
            outputs += self._recover(now)
            outputs += self._dispatch(now)
            if (chain := self._relays.decide(now, self._tracking.newest, self._now())) is not None:
                outputs.append(Output(RELAY_CHAIN, self._step.shard.run, chain))
        # First: what is given to a replica after its cancellation elsewhere, or in another plan, is to stay.
        return [*self._tracking.take_cancels(), *outputs]

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        tracking = self._tracking
        return Checkpoint(
            low_water=tracking.low_water(positions),
            ledger_from=tracking.table.oldest_emission(),
            state={
                **tracking.state(),
                "lease": self._leases.last,
                "round": self._rounds.left,
                "chain": self._relays.number,
                "prompts": self._numbers.state(),
            },
        )

    def busy(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def _take(self, received: ReceivedRecord, now: float) -> list[Output]:
        match received.record:
            case Prompt() as prompt:
                if prompt.purpose == "imported":
                    return [self._tracking.reject(received, f"{prompt.prompt_id}: what is imported is not asked for")]
                if (strange := self._numbers.refuse(prompt.purpose, prompt.number)) is not None:
                    return [self._tracking.reject(received, strange)]
                if not fits_inbox(prompt, 0):
                    reason = f"{prompt.prompt_id}: a prompt so large fits into no inbox"
                    return [self._tracking.reject(received, reason), *self._tracking.turn_away(prompt, reason)]
                self._waiting.add(received)
            case ReplicaStatus() as status:
                return self._hear(received, status, now)
            case RelayStatus() as relay:
                self._relays.hear(relay, now)
            case RelayChain() as chain:
                if not self._relays.learn(chain, now):
                    reason = f"chain {chain.number} is not of placement, whose last is {self._relays.number}"
                    return [self._tracking.reject(received, reason)]
            case Trajectory() as trajectory:
                return self._tracking.finish(received, trajectory)
            case Settled() as settled:
                return self._tracking.settle(received, settled)
            case WeightVersion() as version:
                self._tracking.cover(version)
            case Progress() as progress:
                return self._tracking.progress(received, progress, self._replicas.is_alive)
            case AssignmentRejected() as refused:
                return self._tracking.refuse(received, refused)
        return []

    def _hear(self, received: ReceivedRecord, status: ReplicaStatus, now: float) -> list[Output]:
        run, replicas = self._step.shard.run, self._step.replicas
        if status.run != run:
            return [self._tracking.reject(received, f"a heartbeat of run {status.run!r}, not of {run!r}")]
        if not 0 <= status.replica < replicas:
            return [self._tracking.reject(received, f"replica {status.replica} has no inbox: there are {replicas}")]
        self._replicas.hear(status, now)
        return []

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _recover(self, now: float) -> list[Output]:
        """Work of replicas that are gone goes on elsewhere, under the next lease."""
        timeout, table = self._step.config.heartbeat_timeout_s, self._tracking.table
        gone = self._replicas.silent(now, timeout)
        if now - self._started_at >= timeout:  # until then one never heard of may be alive: its heartbeats come in now
            gone += [owner for owner in table.owners() if not self._replicas.heard_of(owner)]
        try:
            for process in sorted({owner.replica // self._step.hosted for owner in gone}):
                self._fence(process)
            self._replicas.presume_gone(gone)
        except CannotFence as error:
            log.warning("nobody is given up while Kafka is away: %s", error)
            self._replicas.forgive(now)
            self._started_at = now
        return [output for owned in table.orphans(self._replicas.is_over) for output in self._tracking.lose(owned)]

    def _dispatch(self, now: float) -> list[Output]:
        moves = self._moving.go_on(now)
        sent = self._dispatcher.dispatch(self._replicas.alive(), self._emissions)
        return [*moves, *(Output(INBOX, "", each, each.replica) for each in sent)]
