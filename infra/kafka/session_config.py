"""The Kafka configuration of one shard of one pipeline, by full topic names."""

from __future__ import annotations

import re
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
    """A topic to read, from the committed offset, the earliest one, or the present end.

    Without a committed offset it is read from its beginning, or only the `newest` offsets of each partition; with
    `newest` also where the log begins after that offset. With `sought` the log may begin after it, too: `Session.seek`
    says where reading begins.
    """

    topic: str
    partitions: tuple[int, ...]
    start: Literal["committed", "earliest", "latest"] = "committed"
    newest: int | None = None
    sought: bool = False


class ProcessHeartbeats(NamedTuple):
    """The heartbeats of the replicas of rollout process `process`, among others in `place`, a compacted partition."""

    place: Partition
    run: str
    process: int


@dataclass(frozen=True)
class SessionConfig:
    """The configuration of a session. `group` is the consumer group and the transactional.id, `ledger` the outputs to
    read back.

    Commit notes go to the partition `restore` of a compacted topic. Only this shard writes the partitions `owned`, and
    only this shard the records of its ledger whose keys match the pattern `ledger_keys`. A start without a note fails
    if it finds such records, a trimmed ledger, one of its `heartbeats`, or committed offsets of its group. An open
    transaction of a dead process blocks read_committed readers for at most `transaction_timeout_s` seconds, and no
    transaction may take longer.
    `shards` is the number of the role's shards, where it may change; a session that `retires` its shard seals the note,
    see `resharding`. The entries `of_newest` of the state are about records before those that are read next: a start
    that skips records of an input with `newest` has none.
    """

    client: ClientProperties
    group: str
    inputs: tuple[Input, ...]
    restore: Partition
    ledger: tuple[Partition, ...] = ()
    owned: tuple[Partition, ...] = ()
    ledger_keys: bytes = b""
    heartbeats: ProcessHeartbeats | None = None
    transaction_timeout_s: float = 60.0
    shards: int = 1
    retires: bool = False
    of_newest: tuple[str, ...] = ()

    def has_written(self, key: bytes | None) -> bool:
        """Whether a record with `key` of its ledger is its own."""
        return bool(self.ledger_keys) and re.fullmatch(self.ledger_keys, key or b"") is not None

    @property
    def layout(self) -> tuple[int, bool]:
        """What its notes record of the layout: the number of shards, and whether the note is sealed."""
        return self.shards, self.retires
