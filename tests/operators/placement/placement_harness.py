"""Placement on a log in memory, with a test clock and a list of the processes that it fenced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from in_memory_log import Log, Shard
from record_factories import MAX_REPLICAS, PARTITIONS, manifest, prompt, shard, status, topic_input, version

from infra.kafka.fencing import CannotFence
from infra.kafka.log_ends import EndsUnknown
from infra.kafka.role_notes import NO_NOTES
from operators.io.elements import Output, PartitionKey, Restored, ShardFold
from operators.io.repartition import repartition
from operators.placement.config import PlacementConfig
from operators.placement.place_trajectories import Ends, PlacementFold, PlaceTrajectories
from schemas.columns import flags, floats, token_ids
from schemas.records import (
    Assignment,
    Cancel,
    DeadLetter,
    Metric,
    Pause,
    PolicyVersion,
    Progress,
    RelayStatus,
    Response,
    Trajectory,
    VersionSpan,
)
from schemas.topics import (
    CONTROL,
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
"""The first assignments of the two samples of one prompt, see `with_one_prompt`."""


class Placement:
    """`run` reads the records written to its topics, commits, and returns the outputs."""

    def __init__(
        self, admitted: int = 100, hosted: int = 1, global_batch: int = 1, goal: int = 0, **config: Any
    ) -> None:
        self.log = Log()
        self.now = 0.0
        self.fenced: list[int] = []
        self.notes = NO_NOTES
        self.kafka_is_away = False
        settings = PlacementConfig(**{"heartbeat_timeout_s": TIMEOUT_S, **config})
        self._step = PlaceTrajectories(
            settings, SHARD, PARTITIONS, admitted, hosted, MAX_REPLICAS, global_batch, goal=goal
        )
        self.shard = Shard(self.log, SHARD, self._restore, repartition)
        self.shard.start()

    def _restore(self, restored: Restored) -> ShardFold:
        return PlacementFold(self._step, restored, self._fence, lambda: self.now, lambda: 0, self._ends, self.notes)

    def _ends(self, places: Iterable[PartitionKey]) -> Ends:
        if self.kafka_is_away:
            raise EndsUnknown("no broker responds")
        return {place: self.log.end(place) for place in places}

    def _fence(self, process: int) -> None:
        if self.kafka_is_away:
            raise CannotFence("no broker responds")
        self.fenced.append(process)

    def run(self, seconds: float = 0.0) -> list[Output]:
        self.now += seconds
        return self.shard.run()

    def restart(self) -> None:
        """Crash and start again; uncommitted outputs are lost."""
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
        status_record = RelayStatus(relay, (), 0, "host", 1, 0, address="host:1", store="/store")
        self.log.append(REPLICAS, status_record, f"relay-{relay}")

    def pause(self, number: int, paused: bool = True) -> None:
        self.log.append(CONTROL, Pause(number, paused, "ada@host", "", 1_700_000_000_000), "pause")

    def publish(self, number: int, *batches: int, epoch: int = 1, final: bool = False) -> PolicyVersion:
        of = version(number, epoch)
        self.log.append(RELAY, manifest(of, batches, final=final), str(of))
        return of

    def finish(self, *records: Trajectory) -> None:
        for record in records:
            where = partition_of(record.prompt.number, PARTITIONS)
            self.log.append(TRAJECTORIES, record, record.prompt.prompt_id, where)

    def write(self, topic: Any, *records: Any) -> None:
        for record in records:
            self.log.append(topic, record)


def with_one_prompt() -> Placement:
    """One prompt of two samples, both assigned to replica 0."""
    placement = Placement()
    placement.prompts(0)
    placement.beat(0, placement.publish(0))
    assert assigned(placement.run()) == BOTH
    return placement


def with_requests(samples: int, **config: Any) -> Placement:
    """As `with_one_prompt`, with `samples` samples."""
    placement = Placement(**config)
    placement.prompts(0, samples=samples)
    placement.beat(0, placement.publish(0))
    placement.run()
    return placement


def newest() -> PolicyVersion:
    return version(0)


def assigned(outputs: list[Output]) -> list[tuple[str, int, int]]:
    """Trajectory, replica and attempt of each assignment, in order."""
    records = [output.record for output in outputs if isinstance(output.record, Assignment)]
    assert all(o.partition == o.record.replica for o in outputs if isinstance(o.record, Assignment))
    return [(record.trajectory_id, record.replica, record.attempt) for record in records]


def names(outputs: list[Output]) -> list[str]:
    """The assigned trajectories, in order."""
    return [name for name, _, _ in assigned(outputs)]


def leases(outputs: list[Output]) -> dict[str, int]:
    return {o.record.trajectory_id: o.record.lease for o in outputs if isinstance(o.record, Assignment)}


def cancelled(outputs: list[Output]) -> set[tuple[str, int, int]]:
    """Trajectory, replica and incarnation of each cancel."""
    return {
        (name, output.record.replica, output.record.incarnation)
        for output in outputs
        if isinstance(output.record, Cancel)
        for name in output.record.trajectory_ids
    }


def failed_by_placement(outputs: list[Output]) -> dict[str, str | None]:
    """Trajectories that placement finishes as failed, and the reason."""
    return {o.record.trajectory_id: o.record.error for o in outputs if isinstance(o.record, Trajectory)}


def response(tokens: list[int]) -> Response:
    return Response(token_ids(tokens), floats([-t / 8 for t in tokens]), flags([True] * len(tokens)))


def progress(name: str, tokens: list[int], lease: int, start: int = 0, under: int = 0, **changes: Any) -> Progress:
    fields = {
        "trajectory_id": name,
        "lease": lease,
        "attempt": 1,
        "replica": 0,
        "incarnation": 1,
        "start": start,
        "gained": response(tokens),
        "version_spans": (VersionSpan(version(under), len(tokens)),),
        "next_owner": None,
        "first_token_at": None,
        "written_at": 0,
    }
    return Progress(**(fields | changes))


def partials(outputs: list[Output]) -> dict[str, tuple[list[int], PolicyVersion | None]]:
    """The tokens that each assignment resumes from, and its version."""
    records = [output.record for output in outputs if isinstance(output.record, Assignment)]
    return {
        r.trajectory_id: ([] if r.partial is None else r.partial.token_ids.to_pylist(), r.policy_version)
        for r in records
    }


def pauses(outputs: list[Output]) -> list[tuple[int, dict[str, float]]]:
    """Number and values of each metric about a pause."""
    found = [o.record for o in outputs if isinstance(o.record, Metric) and o.record.name == "pause"]
    return [(record.step, record.values) for record in found]


def dead_letters(outputs: list[Output]) -> list[str]:
    return [output.record.reason for output in outputs if isinstance(output.record, DeadLetter)]


_COMMITTED = tuple(
    topic_input(topic, blocks=topic is TRAJECTORIES)
    for topic in (PROMPTS, EVAL_PROMPTS, PROGRESS, TRAJECTORIES, SETTLED)
)
SHARD = shard(
    "placement",
    *_COMMITTED,
    topic_input(RELAY),
    topic_input(RELAY_CHAIN, start="earliest"),
    topic_input(CONTROL, start="earliest"),
    topic_input(REPLICAS, start="latest"),
    ledger=(INBOX.short_name,),
)
