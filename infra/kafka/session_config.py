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
    """A topic to read: from the committed offset (the earliest before there is one), the earliest, or today's end."""

    topic: str
    partitions: tuple[int, ...]
    start: Literal["committed", "earliest", "latest"] = "committed"


@dataclass(frozen=True)
class SessionConfig:
    """Who reads what. `group` is the consumer group and the transactional.id, `ledger` the outputs to read back.

    The commit's note travels with `anchor`, the first input's first partition unless given (a pipeline without
    committed inputs anchors on a partition that it writes). Notes too long for that go to `restore`.
    """

    client: ClientProperties
    group: str
    inputs: tuple[Input, ...]
    ledger: tuple[Partition, ...] = ()
    anchor: Partition | None = None
    restore: Partition | None = None

    @property
    def anchored(self) -> Partition:
        return self.anchor or Partition(self.inputs[0].topic, self.inputs[0].partitions[0])
