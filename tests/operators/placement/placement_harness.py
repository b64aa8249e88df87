"""Placement on a log in memory, with a clock of the test's own and a list of what it fenced."""

from __future__ import annotations

from typing import Any

from in_memory_log import Log, Shard
from record_factories import MAX_REPLICAS, PARTITIONS, manifest, prompt, shard, status, topic_input, version

from infra.kafka.fencing import CannotFence
from operators.io.elements import Output, Restored
from operators.io.fold_records import ShardFold
from operators.placement.config import PlacementConfig
from operators.placement.place_trajectories import PlaceTrajectories, _Placing
from schemas.records import Assignment, Cancel, PolicyVersion, RelayStatus, Trajectory
from schemas.topics import (
    EVAL_PROMPTS,
    INBOX,
    PROGRESS,
    PROMPTS,
    RELAY,
    RELAY_CHAIN,
    REPLICAS,
    SETTLED,
    TRAJECTORIES,
    partition_of,
)

TIMEOUT_S = 10.0
BOTH = [("p0.0", 0, 1), ("p0.1", 0, 1)]
"""Where the two samples of one prompt are at first, see `with_one_prompt`."""


class Placement:
    """What is written to its topics it sees at the next `run`, which returns what came of it and commits."""

    def __init__(self, admitted: int = 100, hosted: int = 1, global_batch: int = 1, **config: Any) -> None:
        self.log = Log()
        self.now = 0.0
        self.fenced: list[int] = []
        self.kafka_is_away = False
        settings = PlacementConfig(**{"heartbeat_timeout_s": TIMEOUT_S, **config})
        self._step = PlaceTrajectories(settings, SHARD, PARTITIONS, admitted, hosted, MAX_REPLICAS, global_batch)
        self.shard = Shard(self.log, SHARD, self._restore)
        self.shard.start()

    def _restore(self, restored: Restored) -> ShardFold:
        return _Placing(self._step, restored, self._fence, lambda: self.now, lambda: 0)

    def _fence(self, process: int) -> None:
        if self.kafka_is_away:
            raise CannotFence("nobody answers")
        self.fenced.append(process)

    def run(self, seconds: float = 0.0) -> list[Output]:
        self.now += seconds
        return self.shard.run()

    def restart(self) -> None:
        """Die, and come back; what was not committed is lost."""
        self.shard.start()

    def prompts(self, *numbers: int, samples: int = 2) -> None:
        for number in numbers:
            self.log.append(PROMPTS, prompt(number, samples), f"p{number}")

    def questions(self, *numbers: int, under: PolicyVersion) -> None:
        for number in numbers:
            asked = prompt(number, 1, purpose="evaluation", policy_version=under, round=f"{under}/greedy")
            self.log.append(EVAL_PROMPTS, asked, f"e{number}")

    def beat(self, replica: int, under: PolicyVersion | None, incarnation: int = 1, **changes: Any) -> None:
        self.log.append(REPLICAS, status(replica, under, incarnation, **changes), f"rollout-{replica}")

    def relay_beats(self, relay: int) -> None:
        said = RelayStatus(relay, (), 0, "host", 1, 0, address="host:1", store="/store")
        self.log.append(REPLICAS, said, f"relay-{relay}")

    def publish(self, number: int, *batches: int, epoch: int = 1, final: bool = False) -> PolicyVersion:
        of = version(number, epoch)
        self.log.append(RELAY, manifest(of, batches, final=final), str(of))
        return of

    def finish(self, *records: Trajectory) -> None:
        for record in records:
            where = partition_of(record.prompt.number, PARTITIONS)
            self.log.append(TRAJECTORIES, record, record.prompt.prompt_id, where)

    def tell(self, topic: Any, *records: Any) -> None:
        for record in records:
            self.log.append(topic, record)


def with_one_prompt() -> Placement:
    """One prompt of two samples, both at replica 0."""
    placement = Placement()
    placement.prompts(0)
    placement.beat(0, placement.publish(0))
    assert assigned(placement.run()) == BOTH
    return placement


def newest() -> PolicyVersion:
    return version(0)


def assigned(outputs: list[Output]) -> list[tuple[str, int, int]]:
    """Trajectory, replica and attempt of each assignment, in order."""
    records = [output.record for output in outputs if isinstance(output.record, Assignment)]
    assert all(o.partition == o.record.replica for o in outputs if isinstance(o.record, Assignment))
    return [(record.trajectory_id, record.replica, record.attempt) for record in records]


def leases(outputs: list[Output]) -> dict[str, int]:
    return {o.record.trajectory_id: o.record.lease for o in outputs if isinstance(o.record, Assignment)}


def cancelled(outputs: list[Output]) -> set[tuple[str, int, int]]:
    """Trajectory, replica and incarnation of what is cancelled."""
    return {
        (name, output.record.replica, output.record.incarnation)
        for output in outputs
        if isinstance(output.record, Cancel)
        for name in output.record.trajectory_ids
    }


def given_up(outputs: list[Output]) -> dict[str, str | None]:
    """Trajectories that placement itself ends, and why."""
    return {o.record.trajectory_id: o.record.error for o in outputs if isinstance(o.record, Trajectory)}


_COMMITTED = tuple(topic_input(topic) for topic in (PROMPTS, EVAL_PROMPTS, PROGRESS, TRAJECTORIES, SETTLED))
SHARD = shard(
    "placement",
    *_COMMITTED,
    topic_input(RELAY),
    topic_input(RELAY_CHAIN, start="earliest"),
    topic_input(REPLICAS, start="latest"),
    ledger=(INBOX.short_name,),
)
