"""Observes a run from outside: metrics, weight versions and heartbeats as they are published, and consumer lag.

An observer joins no group, commits nothing and writes nothing, so it does not affect the run. A broker that does not
respond is no error here: the last values stay until it responds.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kafka import KafkaAdminClient, TopicPartition
from kafka.admin import OffsetSpec
from kafka.errors import KafkaError

from infra.closing import ClosedAtExit
from infra.kafka.admin import admin_client
from infra.kafka.client_patches import position_in
from infra.kafka.consumers import new_consumer, warn_of_gap
from infra.kafka.lag import list_groups
from infra.kafka.properties import ClientProperties
from infra.kafka.record_batches import RecordBatch
from infra.kafka.unreadable_record import UnreadableRecord
from schemas.codec import UndecodableRecord, decode
from schemas.topics import CATALOGUE, INBOX, METRICS, RELAY, REPLICAS, TRAJECTORIES, run_prefix

log = logging.getLogger(__name__)

LAG_EVERY_S = 2.0
GROUPS_EVERY_S = 10.0
"""Groups are listed rarely: a new one appears only at the first start of a role."""
LAG_RETRY_S = 10.0
"""Pause after a lag request that failed."""
ANSWER_MS = 3_000
MAX_BATCHES = 2_000
"""Maximum batches per poll: those of metrics and heartbeats have few records."""
NEWEST = {METRICS.short_name: 20_000, RELAY.short_name: 100}
"""Number of newest offsets that an observer without positions reads: less than a second of work, though the manifest of
a large model has tens of kilobytes."""

GroupOffsets = Mapping[str, Mapping[TopicPartition, int]]
"""Offset by partition by group."""


_MOVING = ("score", "experience", "trainer")
"""Pipelines whose partitions may move to another shard or rank; the group of the one before keeps its last offset."""
_NO_POSITION = ("placement", TRAJECTORIES.short_name)
"""A consumer and a topic of which it commits the oldest trajectory that is outstanding, not how far it has read."""


def topic_lags(run: str, committed: GroupOffsets, ends: Mapping[TopicPartition, int]) -> dict[str, int]:
    """The lag of the slowest consumer of each topic, by the topic's short name, in the order of the catalogue.

    The lag of a pipeline is the sum over its shards' partitions; the largest of several pipelines counts. Only
    consumers named in the catalogue count, without `_NO_POSITION`. Transaction markers are included.
    """
    behind: dict[str, Counter[str]] = defaultdict(Counter)
    for (short_name, pipeline, _, _), lag in _lags(run, committed, ends).items():
        behind[short_name][pipeline] += lag
    return {short_name: max(behind[short_name].values()) for short_name in CATALOGUE if short_name in behind}


def inbox_lags(run: str, committed: GroupOffsets, ends: Mapping[TopicPartition, int]) -> dict[int, int]:
    """The lag of the slowest consumer of each replica's inbox, by replica; otherwise as `topic_lags`."""
    behind: dict[int, int] = {}
    for (short_name, _, _, partition), lag in _lags(run, committed, ends).items():
        if short_name == INBOX.short_name:
            behind[partition] = max(lag, behind.get(partition, 0))
    return behind


def _lags(
    run: str, committed: GroupOffsets, ends: Mapping[TopicPartition, int]
) -> dict[tuple[str, str, str, int], int]:
    """The lag of each committed offset that counts, by topic, pipeline, group and partition.

    The groups of a pipeline in `_MOVING` count as one, with the least lag of each partition.
    """
    prefix, found = run_prefix(run), dict[tuple[str, str, str, int], int]()
    for group, offsets in committed.items():
        pipeline = group.removeprefix(prefix).rpartition(".")[0]
        for where, offset in offsets.items():
            short_name = where.topic.removeprefix(prefix)
            known = short_name in CATALOGUE and pipeline in CATALOGUE[short_name].consumers
            if known and (pipeline, short_name) != _NO_POSITION and where in ends:
                reader = short_name, pipeline, "" if pipeline in _MOVING else group, where.partition
                lag = max(0, ends[where] - offset)
                found[reader] = min(lag, found.get(reader, lag))
    return found


class Observer(ClosedAtExit):
    """Reads metrics and weight manifests of one run, and heartbeats from now on. Not thread-safe.

    It resumes at `positions`, offsets by short name (math.inf: the end), or begins near the end, see `NEWEST`. It logs
    which offsets after its positions the log does not have. The run's topics must exist.
    `refuse` returns why a record, written in a transaction or not, cannot be of the run; None if it can.
    Raises KafkaError if no broker responds at first.
    """

    def __init__(
        self,
        client: ClientProperties,
        run: str,
        *,
        positions: Mapping[str, float] | None = None,
        refuse: Callable[[Any, bool], str | None] = lambda record, transactional: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._run, self._clock, self._refuse = client, run, clock, refuse
        self._admin: KafkaAdminClient | None = None
        self._groups: list[str] = []
        self._groups_at = self._requested_at = -float("inf")
        self._lag: dict[str, int] = {}
        self.inbox_lag: dict[int, int] = {}
        """By replica, when `lag` was requested last."""
        self._positions: dict[TopicPartition, int] = {}
        self._consumer = new_consumer(client, MAX_BATCHES)
        metrics, relay, replicas = (TopicPartition(topic.name(run), 0) for topic in (METRICS, RELAY, REPLICAS))
        try:
            self._consumer.assign([metrics, relay, replicas])
            self._read = {METRICS.short_name: metrics, RELAY.short_name: relay}
            self._ends = self._consumer.end_offsets([metrics, relay])
            begins = self._consumer.beginning_offsets([metrics, relay])
            for short_name, where in self._read.items():
                wanted = (positions or {}).get(short_name)
                newest = self._ends[where] - NEWEST[short_name] if wanted is None else wanted
                self._positions[where] = int(min(max(newest, begins[where]), self._ends[where]))
                if wanted is not None and wanted != math.inf:
                    warn_of_gap(where, int(wanted), self._positions[where])
                self._consumer.seek(where, self._positions[where])
            self._consumer.seek_to_end(replicas)
            self._positions[replicas] = self._consumer.position(replicas)  # now, not at the first poll
        except BaseException:
            self.close()
            raise

    def poll(self, timeout_s: float = 0.0) -> list[Any]:
        """The Metric, WeightVersion, ReplicaStatus and RelayStatus records since the last call; waits up to
        `timeout_s`.

        Any other record, and one that is refused, is returned as UnreadableRecord.
        """
        try:
            polled = self._consumer.poll(timeout_ms=int(timeout_s * 1000))
        except KafkaError as error:
            log.debug("cannot poll: %r", error)
            return []
        batches = ((place, batch.value) for place, found in polled.items() for batch in found)
        return [row for place, batch in batches for row in self._rows(place, batch)]

    def expect_all(self) -> None:
        """Let `caught_up` tell whether all records that exist now have been polled, heartbeats included."""
        try:
            self._ends = self._consumer.end_offsets(list(self._positions))
        except KafkaError as error:
            log.debug("cannot request the ends: %r", error)

    def caught_up(self) -> bool:
        """Whether all records that existed when this observer was created have been polled; see `expect_all`."""
        return all(self._position(where) >= end for where, end in self._ends.items())

    def positions(self) -> dict[str, float]:
        """The next offsets, by short name, from which another observer can resume."""
        return {short_name: float(self._position(where)) for short_name, where in self._read.items()}

    def _position(self, where: TopicPartition) -> int:
        """The next offset to read; the last known one while no broker responds."""
        try:
            position = position_in(self._consumer, where, ANSWER_MS)
        except KafkaError as error:
            log.debug("cannot request the position in %s: %r", where, error)
            position = None
        if position is not None:
            self._positions[where] = position
        return self._positions[where]

    def lag(self) -> dict[str, int]:
        """The lag by short name, see `topic_lags`; requested from Kafka at most every `LAG_EVERY_S`."""
        now = self._clock()
        if now - self._requested_at < LAG_EVERY_S:
            return self._lag
        self._requested_at = now
        try:
            self._lag = self._request_lag(now)
        except KafkaError as error:
            log.debug("cannot read the lag: %r", error)
            self._requested_at = now + LAG_RETRY_S - LAG_EVERY_S
            self._close_admin()
        return self._lag

    def close(self) -> None:
        """Close the connections."""
        self._close_admin()
        self._consumer.close(autocommit=False, timeout_ms=1000)

    def _rows(self, place: TopicPartition, batch: RecordBatch) -> Iterator[Any]:
        short_name = place.topic.removeprefix(run_prefix(self._run))
        for offset, value, headers in zip(batch.offsets, batch.values, batch.headers, strict=True):
            try:
                rows = decode(value, headers)
            except UndecodableRecord as error:
                yield UnreadableRecord(short_name, place.partition, offset, str(error))
                continue
            if not isinstance(rows[0], CATALOGUE[short_name].record_classes):
                reason: str | None = f"a {type(rows[0]).__name__} does not belong on {short_name}"
            else:
                reason = next(filter(None, (self._refuse(row, batch.transactional) for row in rows)), None)
            if reason is None:
                yield from rows
            else:
                yield UnreadableRecord(short_name, place.partition, offset, reason)

    def _request_lag(self, now: float) -> dict[str, int]:
        if self._admin is None:
            waits = {"request_timeout_ms": ANSWER_MS, "bootstrap_timeout_ms": ANSWER_MS}
            self._admin = admin_client(self._client, **waits)
        if now - self._groups_at >= GROUPS_EVERY_S or not self._groups:
            self._groups, self._groups_at = list_groups(self._admin, run_prefix(self._run)), now
        if not self._groups:
            return {}
        offsets = self._admin.list_group_offsets(self._groups)
        committed = {
            group: {where: found.offset for where, found in of_group.items() if found.offset >= 0}
            for group, of_group in offsets.items()
        }
        prefix = run_prefix(self._run)
        wanted = {where for of_group in committed.values() for where in of_group if where.topic.startswith(prefix)}
        if not wanted:
            return {}
        ends = self._admin.list_partition_offsets(
            dict.fromkeys(wanted, OffsetSpec.LATEST), isolation_level="read_committed"
        )
        offsets_at_end = {where: found.offset for where, found in ends.items()}
        self.inbox_lag = inbox_lags(self._run, committed, offsets_at_end)
        return topic_lags(self._run, committed, offsets_at_end)

    def _close_admin(self) -> None:
        if self._admin is not None:
            self._admin.close()
            self._admin = None
