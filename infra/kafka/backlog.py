"""The lag of a consumer group on a topic, used as back-pressure."""

from __future__ import annotations

import logging

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError

from infra.kafka.properties import ClientProperties

log = logging.getLogger(__name__)


class Backlog:
    """Counts the records of `topic` that `group` has not committed. Joins no group and commits nothing."""

    def __init__(self, client: ClientProperties, group: str, topic: str) -> None:
        self._consumer = KafkaConsumer(
            **client.consumer(group_id=group, enable_auto_commit=False, isolation_level="read_committed")
        )
        self._partitions = [TopicPartition(topic, p) for p in sorted(self._consumer.partitions_for_topic(topic) or {0})]
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
