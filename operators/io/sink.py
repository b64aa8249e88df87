"""A shard's sink: group commit. What is emitted while one transaction is under way goes into the next, all together.

The step never waits for Kafka, and a busy shard makes few, large transactions. A transaction holds whole emissions, in
order, with the last one's checkpoint, so outputs and low-water mark move together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from infra.kafka.session import SESSIONS, Outgoing, Partition, SessionLost
from operators.io.config import ShardConfig
from operators.io.elements import Emission, Output
from schemas.codec import encode_all, record_type

log = logging.getLogger(__name__)

MAX_WAITING = 64
"""Emissions that may wait for a transaction before the step is held back."""


class ShardSink:
    """Commits emissions of one shard in a thread of its own. Lives once a process and shard."""

    def __init__(self, config: ShardConfig) -> None:
        self._config = config
        self._waiting: list[Emission] = []
        self._changed = threading.Condition()
        self._idle = True
        self._start = 0
        self._known: dict[str, int] = {}
        self._floors: dict[int, dict[str, int]] = {}
        self._committed_at = time.monotonic()
        self._failure: BaseException | None = None
        self._ledger_names = {topic.name(config.run) for topic, _ in config.ledger}
        threading.Thread(target=self._run, name=f"sink {config.group}", daemon=True).start()

    def write(self, emission: Emission) -> None:
        """Take `emission`; it is durable after `flush`. Waits while too many are before it. Raises what broke the sink."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < MAX_WAITING or self._failure)
            self._raise()
            self._waiting.append(emission)
            self._changed.notify_all()

    def flush(self) -> None:
        """Return once everything taken is committed, or dropped because its session is over. Raises what broke the sink."""
        with self._changed:
            self._changed.wait_for(lambda: (self._idle and not self._waiting) or self._failure)
            self._raise()

    def _raise(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"{self._config.group}: the sink failed: {self._failure!r}") from self._failure

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                emissions, self._waiting = self._waiting, []
                self._idle = False
                self._changed.notify_all()
            try:
                self._commit(emissions)
            except SessionLost as lost:
                log.warning("%s", lost)  # the source sees it and opens a new session
            except BaseException as error:  # noqa: BLE001 - the step's thread raises it
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._idle = True
                self._changed.notify_all()

    def _commit(self, emissions: Sequence[Emission]) -> None:
        session = SESSIONS.get(self._config.group)
        if session is None or session.lost is not None:
            return
        emissions = [emission for emission in emissions if emission.start == session.start]
        if not emissions:
            return
        if self._start != session.start:
            self._start, self._known = session.start, dict(session.ledger_ends)
            self._floors = {0: dict(session.note.ledger)}
        outputs = [output for emission in emissions for output in emission.outputs]
        if not outputs and time.monotonic() - self._committed_at < self._config.commit_s:
            return
        for emission in emissions:
            if emission.outputs:
                self._floors[emission.number] = dict(self._known)
        checkpoint = emissions[-1].checkpoint
        low_water = {
            Partition(self._topic(place.topic), place.partition): offset
            for place, offset in checkpoint.low_water.items()
        }
        first = session.commit(
            self._outgoing(outputs), low_water, self._ledger_offsets(checkpoint.ledger_from), checkpoint.marks
        )
        self._known |= {
            place: offset for place, offset in first.items() if place.rpartition(":")[0] in self._ledger_names
        }
        self._committed_at = time.monotonic()

    def _ledger_offsets(self, oldest: int | None) -> Mapping[str, int]:
        if oldest is None:
            self._floors.clear()
            return self._known
        for number in [n for n in self._floors if n < oldest]:
            del self._floors[number]
        return self._floors[oldest]

    def _outgoing(self, outputs: Iterable[Output]) -> list[Outgoing]:
        """Outputs of one topic, partition, key and class travel as rows of one record where their encoding allows."""
        rows: dict[tuple[str, int | None, str, object], list[object]] = {}
        for index, (topic, key, record, partition) in enumerate(outputs):
            apart = None if record_type(type(record)).rows else index
            rows.setdefault((topic.name(self._config.run), partition, key, (type(record), apart)), []).append(record)
        return [
            Outgoing(topic, partition, key.encode() or None, value, headers)
            for (topic, partition, key, _), records in rows.items()
            for value, headers in encode_all(records)
        ]

    def _topic(self, noun: str) -> str:
        return next(r.topic.name(self._config.run) for r in self._config.readings if r.topic.noun == noun)


_SINKS: dict[str, ShardSink] = {}


def sink_of(config: ShardConfig) -> ShardSink:
    """The sink of `config`'s shard in this process."""
    if config.group not in _SINKS:
        _SINKS[config.group] = ShardSink(config)
    return _SINKS[config.group]
