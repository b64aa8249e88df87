"""Consumer lag of the groups of a run, for display and as back-pressure."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kafka.errors import CoordinatorLoadInProgressError, KafkaError

from infra.kafka.admin import beginning_offsets, committed_offsets, end_offsets, list_topics
from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import retry_transient
from infra.kafka.record_batches import known_partitions


@dataclass(frozen=True, slots=True)
class Lag:
    """A group's committed offset in one partition, and the partition's last stable offset."""

    group: str
    topic: str
    partition: int
    committed: int
    end: int

    @property
    def lag(self) -> int:
        """Records and transaction markers after the committed offset."""
        return max(0, self.end - self.committed)


def list_groups(client: KafkaAdminClient, prefix: str) -> list[str]:
    """The sorted names of the groups with a prefix; waits for a broker that has just started."""
    found = retry_transient(client.list_groups, CoordinatorLoadInProgressError, 10.0)  # it loads committed offsets
    return sorted(group["group_id"] for group in found if group["group_id"].startswith(prefix))


def group_lags(client: KafkaAdminClient, groups: Iterable[str]) -> list[Lag]:
    """The lag of each group in each partition with a committed offset, sorted; without deleted topics."""
    committed = {group: committed_offsets(client, group) for group in groups}
    existing = set(list_topics(client))
    topics = sorted({each.topic for offsets in committed.values() for each in offsets} & existing)
    ends = end_offsets(client, topics) if topics else {}
    return sorted(
        (
            Lag(group, where.topic, where.partition, found.offset, ends[where])
            for group, offsets in committed.items()
            for where, found in offsets.items()
            if where in ends
        ),
        key=lambda lag: (lag.group, lag.topic, lag.partition),
    )


def record_counts(client: KafkaAdminClient, topics: list[str]) -> dict[str, int]:
    """The number of offsets of each topic: records, transaction markers and compacted records."""
    counts: dict[str, int] = defaultdict(int)
    first, last = beginning_offsets(client, topics), end_offsets(client, topics)
    for where, end in last.items():
        counts[where.topic] += max(0, end - first[where])
    return dict(counts)


log = logging.getLogger(__name__)


class Backlog:
    """Counts the records of `topic` that `group` has not committed. Joins no group and commits nothing."""

    def __init__(self, client: ClientProperties, group: str, topic: str) -> None:
        self._consumer = KafkaConsumer(
            **client.consumer(group_id=group, enable_auto_commit=False, isolation_level="read_committed")
        )
        self._partitions = [TopicPartition(topic, p) for p in sorted(known_partitions(self._consumer, topic) or {0})]
        self._consumer.assign(self._partitions)

    def records(self) -> int | None:
        """The lag in offsets, transaction markers included, so it is never too low; None if Kafka does not respond."""
        try:
            ends = self._consumer.end_offsets(self._partitions)
            return sum(ends[tp] - (self._consumer.committed(tp) or 0) for tp in self._partitions)
        except KafkaError as error:
            log.warning("the backlog of %s is unknown: %r", self._partitions[0].topic, error)
            return None

    def close(self) -> None:
        """Close the connection."""
        self._consumer.close(autocommit=False, timeout_ms=1000)
