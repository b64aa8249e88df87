"""Who reads what: the Kafka side of one shard of one pipeline, by full topic names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from infra.kafka.properties import ClientProperties

Offsets = Mapping["Partition", int]


class Partition(NamedTuple):
    """A partition of a topic by its full name; equal to kafka-python's TopicPartition."""

    topic: str
    partition: int


@dataclass(frozen=True)
class Input:
    """A topic to read: from the committed offset, the earliest, or today's end.

    Where no offset is committed yet it is read from its beginning, or the `newest` offsets of each partition alone.
    """

    topic: str
    partitions: tuple[int, ...]
    start: Literal["committed", "earliest", "latest"] = "committed"
    newest: int | None = None


@dataclass(frozen=True)
class SessionConfig:
    """Who reads what. `group` is the consumer group and the transactional.id, `ledger` the outputs to read back.

    Notes go to the partition `restore` of a compacted topic. `owned` are partitions that this shard alone writes: a
    start that finds records there and no note refuses. An open transaction of a dead process holds back every
    read_committed reader for `transaction_timeout_s` seconds at most, and no transaction may take longer.
    """

    client: ClientProperties
    group: str
    inputs: tuple[Input, ...]
    restore: Partition
    ledger: tuple[Partition, ...] = ()
    owned: tuple[Partition, ...] = ()
    transaction_timeout_s: float = 60.0
