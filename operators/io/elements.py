"""What flows between a pipeline's source, its step and its sink.

Guarantee, kept by source, step and sink together: each start of a shard opens with one `Restored`, then `Polled` in
order; every element carries its start's number, and what belongs to another start is dropped. Made by ReadTopics, eaten
by FoldRecords, whose emissions WriteTransactionally eats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from schemas.topics import Topic


class ReceivedRecord(NamedTuple):
    """A decoded record, or a Block of them, and where it stood. `topic` is the noun.

    `timestamp` is the Kafka record's, in Unix milliseconds.
    """

    topic: str
    partition: int
    offset: int
    record: Any
    timestamp: int = 0


class PartitionKey(NamedTuple):
    """A partition of a topic of this run, by the topic's noun."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The first element of a start: what the shard had committed and written before.

    `ledger` is its own output read back from where the last commit's note said; `state` is the operator's part of the
    note; `offsets` are where reading resumes. Emissions are numbered from 1 in a start; the ledger is emission 0.
    """

    group: str
    start: int
    ledger: tuple[ReceivedRecord, ...]
    state: Mapping[str, Any]
    offsets: Mapping[PartitionKey, int]


@dataclass(frozen=True, slots=True)
class Polled:
    """Records of one poll, none on an idle tick. `positions` are the next offsets to read.

    `caught_up` is False until everything that had been written when the shard started has been seen.
    `rejected` are records that could not be decoded. The `last` one comes when this process is asked to stop: what the
    step writes now is still committed.
    """

    group: str
    start: int
    records: tuple[ReceivedRecord, ...]
    rejected: tuple[Any, ...]
    positions: Mapping[PartitionKey, int]
    caught_up: bool
    last: bool = False


class Output(NamedTuple):
    """A record to write, or a Block of them. `partition` None leaves the choice to the key."""

    topic: Topic
    key: str
    record: Any
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a restart needs to know of a step, committed with the outputs that it covers.

    `low_water` are the offsets below which nothing is pending; `ledger_from` is the number of the oldest emission that
    a restart must read back (None: none); `state` go into the commit's note.
    """

    low_water: Mapping[PartitionKey, int] = field(default_factory=dict)
    ledger_from: int | None = None
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Emission:
    """What a step made of one poll, written in one transaction; numbered within its start, from 1."""

    group: str
    start: int
    number: int
    outputs: tuple[Output, ...]
    checkpoint: Checkpoint
