"""Reads what a simulated run commits, at the moment it becomes visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from infra.kafka.simulated_producer import SimulatedRecord
from infra.simulation.cluster import Place, SimulatedCluster
from pipelines.inspect.audit.decode import DecodedRecord, decode_for_audit
from pipelines.inspect.log.describe import describe_record
from schemas import topics
from schemas.codec import UndecodableRecord, decode
from schemas.identity import trajectory_id
from schemas.records import CommitNote, Prompt
from schemas.topics import CATALOGUE, EXPERIENCES, Topic

OBSERVED = (
    *(topics.PROMPTS, topics.EVAL_PROMPTS, topics.INBOX, topics.TRAJECTORIES, topics.EXPERIENCES, topics.SETTLED),
    *(topics.BATCHES, topics.RELAY, topics.CONTROL, topics.DEAD_LETTERS, topics.RESTORE),
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
    """What a record contains, after the name of its prompt or trajectory; "" for one that a timeline omits."""
    match record:
        case CommitNote():
            return ""
        case DecodedRecord():
            return f"{trajectory_id(*record.key)} scored"
        case UndecodableRecord():
            return str(record)[:200]
        case Prompt():
            return f"{record.prompt_id}: {describe_record(record)}"
    name = getattr(record, "trajectory_id", "")
    return f"{name}{name and ': '}{describe_record(record)}"
