"""Reads what a simulated run commits, at the moment it becomes visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from infra.kafka.simulated_producer import Message
from infra.simulation.cluster import Place, SimulatedCluster
from pipelines.inspect.audit.decode import decode_for_audit
from schemas.codec import decode
from schemas.topics import (
    BATCHES,
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
    """A decoded record that has become visible. `topic` is the topic's noun; an experience is only decoded as a key."""

    topic: str
    partition: int
    offset: int
    record: Any


class LogObserver:
    """Calls `digest` with each message that is committed to the observed topics of run `run`, and `handle` with each
    record in it."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        run: str,
        handle: Callable[[Committed], None],
        digest: Callable[[Place, int, Message], None],
    ) -> None:
        self._cluster, self._handle, self._digest = cluster, handle, digest
        self._topics: dict[str, Topic] = {topic.name(run): topic for topic in OBSERVED}
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
            for row in decoder(message.value, message.headers):
                yield Committed(topic.short_name, place.partition, offset, row)
