"""Heartbeats: a thread with its own producer, which reports a replica even while a step hangs.

Heartbeats start before the engines exist: so placement knows at once that the previous incarnation has ended.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from infra.clocks import wall_ms
from infra.kafka.heartbeat_thread import Heartbeat, HeartbeatThread
from infra.kafka.producer import BoundedProducer
from infra.machine import machine_name
from infra.transport.kv_transfer import KVTransfers
from operators.rollout.engine import EngineStatus
from operators.rollout.replica import Replica
from schemas.records import Metric, PolicyVersion, ReplicaState, ReplicaStatus, StageStatus
from schemas.topics import METRICS, REPLICAS

log = logging.getLogger(__name__)

STUCK_EXIT_CODE = 70
"""The exit code of a process whose step timed out: EX_SOFTWARE of sysexits.h."""
NO_LOAD = EngineStatus(0, 0, 0, 0, 0, 0)


class Heartbeats(HeartbeatThread):
    """Publishes the status of the replicas `hosted` of run `run` and the usage of their process.

    Until `set_replicas` is called it reports the replicas as starting. A step that takes longer than `step_timeout_s`
    seconds ends the process by `end`, because a hung kernel or collective does not return.
    """

    def __init__(
        self,
        producer: BoundedProducer,
        run: str,
        process: int,
        hosted: Sequence[int],
        incarnation: int,
        period_s: float,
        step_timeout_s: float = math.inf,
        end: Callable[[], None] = lambda: os._exit(STUCK_EXIT_CODE),
        first_incarnation: int = 0,
    ) -> None:
        self._process, self._run, self._first_incarnation = process, run, first_incarnation
        self._replicas_topic, self._metrics_topic = REPLICAS.name(run), METRICS.name(run)
        self._hosted, self._incarnation = hosted, incarnation
        self._replicas: Sequence[Replica] = ()
        self._stopped = False
        self._staged: set[int] = set()
        """Replicas whose part in a stage group was published last time."""
        self._step_timeout_s, self._end = step_timeout_s, end
        self._step_began: float | None = None
        self._step_seconds = 0.0
        self._usage_period_s, self._usage_due = period_s, -math.inf
        super().__init__("heartbeats", producer, self._records, period_s, self._check_step)

    def set_replicas(self, replicas: Sequence[Replica]) -> None:
        """Report the status of `replicas` from now on."""
        self._replicas = replicas
        self.send_now()

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context that measures one step of the replicas."""
        self._step_began = began = time.monotonic()
        try:
            yield
        finally:
            self._step_began, self._step_seconds = None, time.monotonic() - began

    @property
    def step_seconds(self) -> float:
        """Duration of the last step, or of the present one if that is longer already."""
        began = self._step_began
        return max(self._step_seconds, 0.0 if began is None else time.monotonic() - began)

    def close(self) -> None:
        """Stop the thread, and publish that the replicas have stopped."""
        self.stop()
        self._stopped = True
        self._send()
        super().close()

    def _check_step(self) -> None:
        began = self._step_began
        if began is not None and time.monotonic() - began > self._step_timeout_s:
            log.critical("a step took longer than %.0f s: the process exits", self._step_timeout_s)
            self._end()

    def _records(self) -> Iterator[Heartbeat]:
        for status in self.statuses():
            yield Heartbeat(self._replicas_topic, f"rollout-{status.replica}", status)
        for part in self.stage_statuses():
            yield Heartbeat(self._replicas_topic, f"stage-{part.replica}", part)
        if self._stopped or time.monotonic() >= self._usage_due:
            self._usage_due = time.monotonic() + self._usage_period_s
            yield Heartbeat(self._metrics_topic, "rollout", self.usage_metric())

    def usage_metric(self) -> Metric:
        """Usage since the start of this process: its CPU seconds, those in model code, the tokens and steps of its
        engines and the seconds in which they had requests, the tokens of drafts, and the trajectories that reused or
        recomputed transferred KV; and the share of its replicas that are idle now.
        """
        loads = [replica.engine.status() for replica in self._replicas]
        model_seconds = sum(load.model_seconds for load in loads)
        values = {"cpu/model_seconds": model_seconds, "cpu/process_seconds": time.process_time()}
        values["rollout/tokens"] = sum(load.tokens_generated for load in loads)
        values["rollout/steps"] = sum(replica.progress.steps for replica in self._replicas)
        values["rollout/busy_seconds"] = sum(replica.running.busy_seconds for replica in self._replicas)
        if drafted := sum(load.drafted for load in loads):
            values["speculation/drafted"] = drafted
            values["speculation/accepted"] = sum(load.accepted for load in loads)
        if self._replicas:
            values["rollout/idle_ratio"] = sum(replica.idle for replica in self._replicas) / len(self._replicas)
            values["kv/reused"] = sum(replica.kv.reused for replica in self._replicas)
            values["kv/recomputed"] = sum(replica.kv.recomputed for replica in self._replicas)
        return Metric("rollout", self._process, values, wall_ms())

    def stage_statuses(self) -> list[StageStatus]:
        """The parts of the replicas in stage groups: of those that have no whole version or are in a group, and once
        more when that has ended."""
        now = wall_ms()
        found = []
        for replica in self._replicas:
            if replica.staging is None or self._stopped:
                continue
            status = replica.staging.status(now)
            involved = bool(status.group) or replica.engine.version is None
            if involved or replica.index in self._staged:
                found.append(status)
            (self._staged.add if involved else self._staged.discard)(replica.index)
        return found

    def statuses(self) -> list[ReplicaStatus]:
        """The status of each replica now."""
        if self._replicas:
            return [
                replica_status(
                    replica.index,
                    self._process,
                    replica.incarnation,
                    "stopped" if self._stopped else replica.state,
                    replica.engine.version,
                    replica.engine.status(),
                    self.step_seconds,
                    self._run,
                    replica.reserved,
                    self._first_incarnation,
                    replica.kv_transfers,
                )
                for replica in self._replicas
            ]
        state: ReplicaState = "stopped" if self._stopped else "starting"
        return [
            replica_status(
                *(index, self._process, self._incarnation, state, None, NO_LOAD, 0.0, self._run),
                first_incarnation=self._first_incarnation,
            )
            for index in self._hosted
        ]


def replica_status(
    replica: int,
    process: int,
    incarnation: int,
    state: ReplicaState,
    version: PolicyVersion | None,
    load: EngineStatus,
    step_seconds: float,
    run: str,
    reserved: tuple[str, ...] = (),
    first_incarnation: int = 0,
    kv: KVTransfers | None = None,
) -> ReplicaStatus:
    """The heartbeat record of a replica, whose process transfers KV by `kv`."""
    return ReplicaStatus(
        replica=replica,
        process=process,
        incarnation=incarnation,
        state=state,
        policy_version=version,
        running=load.running,
        waiting=load.waiting,
        capacity=load.capacity,
        kv_used=load.kv_used,
        kv_capacity=load.kv_capacity,
        tokens_generated=load.tokens_generated,
        step_seconds=step_seconds,
        host=machine_name(),
        pid=os.getpid(),
        sent_at=wall_ms(),
        run=run,
        reserved=reserved,
        first_incarnation=first_incarnation,
        kv_address="" if kv is None else kv.address,
        unreachable=() if kv is None else kv.unreachable(),
    )
