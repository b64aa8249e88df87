"""GenerateTrajectories: assignments in, finished trajectories out, by the replicas that this process hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from infra.kafka.producer import BoundedProducer
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Output, Place, Polled, Restored
from operators.rollout.backend import Backend, BackendSpec
from operators.rollout.config import RolloutConfig
from operators.rollout.heartbeats import Heartbeats
from operators.rollout.replica import Replica
from schemas.records import Assignment, Cancel, Refused, Trajectory, WeightVersion
from schemas.topics import PROGRESS, TRAJECTORIES, partition_of

PROBE_S = 5.0
"""How long a process that has nothing to write may not know that it was fenced."""


@dataclass(frozen=True)
class GenerateTrajectories:
    """Hosts the replicas of process `process`, made of `backend`; their incarnation is this start's number."""

    config: RolloutConfig
    shard: ShardConfig
    backend: BackendSpec
    process: int
    partitions: int

    def restore(self, restored: Restored) -> _Generating:
        producer, run = BoundedProducer(self.shard.client), self.shard.run
        hosted = self.config.hosted(self.process)
        heartbeats = Heartbeats(producer, run, self.process, hosted, restored.start, self.config.heartbeat_s)
        try:
            backend = self.backend.open()
            replicas = [
                Replica(index, restored.start, backend.engine(), backend.weights, backend.decode, _wall_ms)
                for index in hosted
            ]
        except BaseException:
            heartbeats.close()
            raise
        heartbeats.attend(replicas)
        return _Generating(self.config, self.partitions, replicas, heartbeats, backend)


class _Generating:
    def __init__(
        self,
        config: RolloutConfig,
        partitions: int,
        replicas: Sequence[Replica],
        heartbeats: Heartbeats,
        backend: Backend,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._partitions, self._heartbeats, self._clock = config, partitions, heartbeats, clock
        self._backend = backend
        self._replicas = {replica.index: replica for replica in replicas}
        self._finished: list[Trajectory | Refused] = []
        self._finished_at = 0.0

    def fold(self, polled: Polled) -> list[Output]:
        for received in polled.records:
            match received.record:
                case Assignment(replica=index, incarnation=incarnation) as assignment:
                    replica = self._replicas[index]
                    if incarnation == replica.incarnation:  # else meant for one that is gone
                        replica.take(assignment)
                case Cancel(replica=index, incarnation=incarnation) as cancel:
                    replica = self._replicas[index]
                    if incarnation == replica.incarnation:
                        replica.cancel(cancel.trajectory_ids)
                case WeightVersion() as version:
                    self._backend.hear(version)
                    for replica in self._replicas.values():
                        replica.announce(version.version)
        self._generate()
        return self._outputs()

    def checkpoint(self, positions: Mapping[Place, int]) -> Checkpoint:
        # A change now and then makes a commit due: a process that was fenced while idle must find out.
        return Checkpoint(positions, marks={"alive": int(self._clock() // PROBE_S)})

    def busy(self) -> bool:
        return any(replica.busy() for replica in self._replicas.values())

    def close(self) -> None:
        self._heartbeats.close()
        for replica in self._replicas.values():
            replica.engine.close()
        self._backend.close()

    def _generate(self) -> None:
        """Step the engines in turn for a while; an idle replica still looks for newer weights."""
        until = self._clock() + self._config.step_s
        while True:
            started = self._clock()
            for replica in self._replicas.values():
                version = replica.engine.version
                finished = replica.step()
                if finished and not self._finished:
                    self._finished_at = started
                self._finished += finished
                if replica.engine.version != version:
                    self._heartbeats.changed()
            ended = self._clock()
            self._heartbeats.step_seconds = ended - started
            if ended >= until or not any(replica.busy() for replica in self._replicas.values()):
                return

    def _outputs(self) -> list[Output]:
        idle = all(replica.idle for replica in self._replicas.values())
        if not self._finished or (not idle and self._clock() - self._finished_at < self._config.linger_s):
            return []
        finished, self._finished = self._finished, []
        return [self._output(record) for record in finished]

    def _output(self, record: Trajectory | Refused) -> Output:
        if isinstance(record, Refused):
            return Output(PROGRESS, record.trajectory_id, record)
        partition = partition_of(record.prompt.number, self._partitions)
        return Output(TRAJECTORIES, record.prompt.prompt_id, record, partition)


def _wall_ms() -> int:
    return time.time_ns() // 10**6
