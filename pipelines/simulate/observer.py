"""Reads what a simulated run commits, at the moment it becomes visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from infra.kafka.simulated_producer import SimulatedRecord
from infra.simulation.cluster import Place, SimulatedCluster
from pipelines.inspect.audit.decode import DecodedRecord, decode_for_audit
from schemas.codec import UndecodableRecord, decode
from schemas.identity import trajectory_id
from schemas.records import Assignment, CommitNote, MicroBatch, Pause, Prompt, Settled, Trajectory, WeightVersion
from schemas.topics import (
    BATCHES,
    CATALOGUE,
    CONTROL,
    DEAD_LETTERS,
    EVAL_PROMPTS,
    EXPERIENCES,
    INBOX,
    PROMPTS,
    RELAY,
    RESTORE,
    SETTLED,
    TRAJECTORIES,
    Topic,
)

OBSERVED = (
    PROMPTS,
    EVAL_PROMPTS,
    INBOX,
    TRAJECTORIES,
    EXPERIENCES,
    SETTLED,
    BATCHES,
    RELAY,
    CONTROL,
    DEAD_LETTERS,
    RESTORE,
)


class Committed(NamedTuple):
    """A decoded record that has become visible, or why it cannot be decoded. `topic` is the topic's noun; an experience
    is only decoded as a key."""

    topic: str
    partition: int
    offset: int
    record: Any


class LogObserver:
    """Calls `digest` with each message that is committed to any topic of run `run`, and `handle` with each record in
    the observed ones."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        run: str,
        handle: Callable[[Committed], None],
        digest: Callable[[Place, int, SimulatedRecord], None],
    ) -> None:
        self._cluster, self._handle, self._digest = cluster, handle, digest
        self._topics: dict[str, Topic] = {topic.name(run): topic for topic in CATALOGUE.values()}
        self._positions: dict[Place, int] = {}
        consumers = cluster.committed

        def committed(place: Place) -> None:
            self._read(place)
            consumers(place)

        cluster.committed = committed

    def _read(self, place: Place) -> None:
        topic = self._topics.get(place.topic)
        if topic is None:
            return
        log, position = self._cluster.log(place), self._positions.get(place, 0)
        if (end := log.stable_end) > position:
            self._positions[place] = end
            for committed in self._decoded(place, topic, max(position, log.begin)):
                self._handle(committed)

    def _decoded(self, place: Place, topic: Topic, position: int) -> Iterator[Committed]:
        for offset, message in self._cluster.log(place).fetch(position, committed=True):
            decoder = decode_for_audit if topic is EXPERIENCES else decode
            self._digest(place, offset, message)
            if topic not in OBSERVED:
                continue
            try:
                rows = list(decoder(message.value, message.headers))
            except UndecodableRecord as error:
                rows = [error]
            for row in rows:
                yield Committed(topic.short_name, place.partition, offset, row)


def event_text(record: Any) -> str:
    """What a record says; "" for one that a timeline omits."""
    match record:
        case Prompt():
            return f"prompt {record.prompt_id}"
        case Assignment():
            start = f" from token {len(record.partial.token_ids)}" if record.partial is not None else ""
            return (
                f"{record.trajectory_id} to replica {record.replica}.{record.incarnation}, lease {record.lease}{start}"
            )
        case Trajectory():
            versions = ", ".join(str(span.version) for span in record.version_spans)
            return f"{record.trajectory_id} {record.finish_reason} on replica {record.replica}, version {versions}"
        case DecodedRecord():
            return f"{trajectory_id(*record.key)} scored"
        case Settled():
            return f"{record.trajectory_id} {record.outcome}" + ("" if record.batch is None else f" in {record.batch}")
        case MicroBatch():
            return f"batch {record.batch}, part {record.index + 1} of {record.count}: {len(record.trajectory_ids)} rows"
        case WeightVersion():
            return f"version {record.version}, batches {list(record.batches)}" + (", final" if record.final else "")
        case Pause():
            return f"request {record.number}: the run {'is paused' if record.paused else 'continues'}"
        case CommitNote():
            return ""
    return str(record)[:200]
