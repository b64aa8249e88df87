"""The elements that flow between a pipeline's source, its step and its sink.

Source, step and sink guarantee together: each start of a shard begins with one `Restored`, followed by `Polled` in
order. Every element carries the number of its start, and elements of another start are dropped. ReadTopics produces
`Restored` and `Polled`; FoldRecords consumes them and produces `Emission`, which MapOutputs steps transform and
WriteTransactionally consumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from schemas.topics import Topic


class ReceivedRecord(NamedTuple):
    """A decoded record, or a Block of them, and its position. `topic` is the topic's noun.

    `timestamp` is that of the Kafka record, in Unix milliseconds.
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
    """The first element of a start: what the shard committed and wrote before it.

    `ledger` is the shard's own output, read back from the offsets in the last commit note; `state` is the step's part
    of that note; `offsets` are the next offsets to read. Emissions of a start are numbered from 1; the ledger is
    emission 0. `shard` is the shard's number in its pipeline. `first_start` is the first start in this process, which
    has not ended since; 0 if that is unknown.
    """

    group: str
    start: int
    ledger: tuple[ReceivedRecord, ...]
    state: Mapping[str, Any]
    offsets: Mapping[PartitionKey, int]
    shard: int = 0
    first_start: int = 0


@dataclass(frozen=True, slots=True)
class Polled:
    """Records of one poll, none on an idle tick. `positions` are the next offsets to read.

    `caught_up` is False until every record that was written before the start has been read; until then `behind` has
    the topics with such records. `rejected` holds dead letters for records that could not be decoded. `last` is True on
    the final element, sent when the process has to stop: the step's outputs for it are still committed. `unread` has
    the topics with records that are not read yet, most of them because a transaction before them is open.
    """

    group: str
    start: int
    records: tuple[ReceivedRecord, ...]
    rejected: tuple[Any, ...]
    positions: Mapping[PartitionKey, int]
    caught_up: bool
    last: bool = False
    behind: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()


class Output(NamedTuple):
    """A record to write, or a Block of them. With `partition` None the key decides the partition."""

    topic: Topic
    key: str
    record: Any
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a restart needs of a step, committed together with the outputs that it covers.

    `low_water` are the offsets below which nothing is pending; `ledger_from` is the number of the oldest emission that
    a restart must read back (None: none); `state` is saved in the commit note.
    """

    low_water: Mapping[PartitionKey, int] = field(default_factory=dict)
    ledger_from: int | None = None
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Emission:
    """The outputs of one poll, written in one transaction. `number` counts within the start, from 1.

    Between a fold and the sink, `outputs` may have domain values, which `MapOutputs` steps turn into `Output`s. `last`
    is that of its poll.
    """

    group: str
    start: int
    number: int
    outputs: tuple[Any, ...]
    checkpoint: Checkpoint
    last: bool = False


class ShardFold(Protocol):
    """The state of a step during one start, and its transitions."""

    def fold(self, polled: Polled) -> Sequence[Any]:
        """Apply `polled`, which may be an idle tick; return outputs, or values for the maps after it."""

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        """What a restart needs once all records before `positions` are folded."""

    def busy(self) -> bool:
        """Whether the step has work without new input; the source then polls without waiting."""
        return False

    def close(self) -> None:
        """Release the resources of this state."""
        return
