"""An in-memory log that loses, repeats and reorders records as Kafka may, and shards of any step on it.

A `Shard` follows the protocol of operators/io exactly: `Restored` from the last commit of its group and its own output
read back from the ledger floors, then `Polled`, emissions numbered from 1, outputs and checkpoint committed
together or not at all. Tests say when it polls, what it sees first, when it commits, and when it dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from infra.kafka.note import Note
from operators.io.commits import LedgerFloors
from operators.io.config import ShardConfig
from operators.io.elements import (
    Checkpoint,
    Emission,
    Output,
    PartitionKey,
    Polled,
    ReceivedRecord,
    Restored,
    ShardFold,
)
from operators.io.fold_records import drop_invalid, reject_invalid, with_manifests
from operators.io.map_outputs import OutputFunction
from operators.io.validation import ManifestOrder
from schemas.block import Block
from schemas.codec import record_type
from schemas.topics import Topic, group_name


class ShardFenced(RuntimeError):
    """A successor, or placement, has fenced the transactional.id of this shard."""


@dataclass(slots=True)
class _Slot:
    """The content of one offset: rows that share a key, or none (a transaction marker)."""

    key: str = ""
    rows: list[Any] = field(default_factory=list)
    made: Block | None = None

    def block(self) -> Block:
        """The rows as a block, created once."""
        if self.made is None or len(self.made) != len(self.rows):
            self.made = Block.of(self.rows)
        return self.made


@dataclass
class _Group:
    """The last commit of a consumer group, and the session that may commit."""

    start: int = 0
    offsets: dict[PartitionKey, int] = field(default_factory=dict)
    ledger: Mapping[str, int] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    holder: object = None


class Log:
    """Topics and groups of one run. `append` is a plain producer, `transact` a transaction with its markers."""

    def __init__(self) -> None:
        self._slots: dict[PartitionKey, list[_Slot]] = {}
        self._groups: dict[str, _Group] = {}

    def append(self, topic: Topic, record: Any, key: str = "", partition: int = 0) -> None:
        self._place(topic.short_name, partition).append(_Slot(key, [record]))

    def transact(self, outputs: Iterable[Output]) -> dict[str, int]:
        """Write `outputs`, consecutive ones of one class and key as rows at one offset; return the first offsets."""
        first: dict[str, int] = {}
        last: dict[tuple[str, int, str], _Slot] = {}
        for topic, key, record, partition in outputs:
            if partition is None:
                assert topic.partitions == "one", f"{topic.short_name} has several partitions: {record} must name one"
                partition = 0
            slots = self._place(topic.short_name, partition)
            slot = last.get((topic.short_name, partition, key))
            kind = record.kind if isinstance(record, Block) else type(record)
            if slot is None or type(slot.rows[0]) is not kind or not record_type(kind).rows:
                slot = last[topic.short_name, partition, key] = _Slot(key)
                first.setdefault(f"{topic.short_name}:{partition}", len(slots))
                slots.append(slot)
            slot.rows += record.records() if isinstance(record, Block) else [record]
        for place in first:
            short_name, _, partition_text = place.rpartition(":")
            self._place(short_name, int(partition_text)).append(_Slot())
        return first

    def end(self, place: PartitionKey) -> int:
        return len(self._place(*place))

    def rows(self, topic: Topic) -> list[Any]:
        """All records of `topic`, partition by partition."""
        return [
            row
            for place in sorted(self._slots)
            if place.topic == topic.short_name
            for s in self._slots[place]
            for row in s.rows
        ]

    def received(
        self, place: PartitionKey, start: int, stop: int, keys: tuple[str, ...] = (), blocks: bool = False
    ) -> list[ReceivedRecord]:
        """The records of `place` from offset `start` to before `stop`, those of a slot together if `blocks`."""
        slots = self._place(*place)
        if blocks:
            return [
                ReceivedRecord(*place, offset, slots[offset].block())
                for offset in range(start, min(stop, len(slots)))
                if slots[offset].key.startswith(keys or "") and slots[offset].rows
            ]
        return [
            ReceivedRecord(*place, offset, row)
            for offset in range(start, min(stop, len(slots)))
            if slots[offset].key.startswith(keys or "")
            for row in slots[offset].rows
        ]

    def committed(self, group: str) -> _Group:
        return self._groups.setdefault(group, _Group())

    def notes(self, pipeline: str) -> dict[int, Note]:
        """The last commit of the first shard of `pipeline`, in run `run`, as `infra.kafka.role_notes` reads it."""
        group = self.committed(group_name("run", pipeline))
        return {0: Note(group.start, state=group.state)} if group.start else {}

    def fence(self, group: str) -> None:
        """Fence the present session of the group."""
        self.committed(group).holder = None

    def _place(self, short_name: str, partition: int) -> list[_Slot]:
        return self._slots.setdefault(PartitionKey(short_name, partition), [])


class Shard:
    """One shard on `log`; `restore` creates its state, and `maps` follow its fold.

    It is down until `start`, and after `crash`.
    """

    def __init__(
        self, log: Log, config: ShardConfig, restore: Callable[[Restored], ShardFold], *maps: OutputFunction
    ) -> None:
        self.log, self.config, self._restore, self._maps = log, config, restore, maps
        self.fold: ShardFold | None = None
        self.validates = False
        """Whether invalid records become dead letters, as in FoldRecords."""
        self.restored: Restored | None = None
        self._waiting: list[Emission] = []

    @property
    def places(self) -> list[PartitionKey]:
        return [PartitionKey(r.topic.short_name, p) for r in self.config.inputs for p in r.partitions]

    def start(self) -> Restored:
        """Open a session and create its state."""
        self.crash()
        log, config = self.log, self.config
        group = log.committed(config.group)
        group.start += 1
        group.holder = self._session = object()
        self._positions = {}
        for reading in config.inputs:
            for p in reading.partitions:
                place = PartitionKey(reading.topic.short_name, p)
                earliest = {"committed": group.offsets.get(place, 0), "earliest": 0, "latest": log.end(place)}
                self._positions[place] = earliest[reading.start]
        if config.start_positions is not None:
            self._positions |= config.start_positions()
        self._ends = {place: log.end(place) for place in self.places}
        ledger_places = [PartitionKey(topic.short_name, p) for topic, partitions in config.ledger for p in partitions]
        ends = {f"{place.topic}:{place.partition}": log.end(place) for place in ledger_places}
        self._floors = LedgerFloors(group.ledger, ends)
        ledger = [
            received
            for place in ledger_places
            for received in log.received(place, group.ledger.get(f"{place.topic}:{place.partition}", 0), log.end(place))
        ]
        self.restored = Restored(
            config.group, group.start, tuple(ledger), dict(group.state), dict(self._positions), config.shard
        )
        self._manifests = ManifestOrder(group.state)
        self.fold = self._restore(drop_invalid(self.restored) if self.validates else self.restored)
        self._emissions = 0
        return self.restored

    def turn(self, most: int = 10**6, only: Sequence[PartitionKey] | None = None) -> tuple[Output, ...]:
        """Poll at most `most` offsets of each partition in `only` (default: all), and fold; the emission is pending."""
        assert self.fold is not None
        received: list[ReceivedRecord] = []
        for place in self.places if only is None else only:
            keys, blocks = next((r.keys, r.blocks) for r in self.config.inputs if r.topic.short_name == place.topic)
            until = min(self._positions[place] + most, self.log.end(place))
            received += self.log.received(place, self._positions[place], until, keys, blocks)
            self._positions[place] = until
        behind = frozenset(place.topic for place, end in self._ends.items() if self._positions[place] < end)
        assert self.restored is not None
        start, positions = self.restored.start, dict(self._positions)
        polled = Polled(self.config.group, start, tuple(received), (), positions, not behind, behind=behind)
        self._emissions += 1
        polled, letters = reject_invalid(polled, self._manifests, 0) if self.validates else (polled, [])
        folded: Sequence[Any] = (*letters, *self.fold.fold(polled))
        outputs = tuple(reduce(lambda made, function: function(made), self._maps, folded))
        checkpoint = with_manifests(self.fold.checkpoint(positions), self._manifests)
        self._waiting.append(Emission(self.config.group, self.restored.start, self._emissions, outputs, checkpoint))
        return outputs

    def seen(self, topic: Topic) -> list[Any]:
        """The records of `topic` before the positions of this shard."""
        places = [place for place in self.places if place.topic == topic.short_name]
        return [r.record for place in places for r in self.log.received(place, 0, self._positions[place])]

    def waiting(self) -> list[Output]:
        """The outputs that the next commit would write."""
        return [output for emission in self._waiting for output in emission.outputs]

    def commit(self) -> None:
        """Commit the pending emissions in one transaction. Raises ShardFenced; then none of them is visible."""
        if not self._waiting:
            return
        group = self.log.committed(self.config.group)
        if group.holder is not self._session:
            raise ShardFenced(self.config.group)
        emissions, self._waiting = self._waiting, []
        for emission in emissions:
            if emission.outputs:
                self._floors.emit(emission.number)
        checkpoint: Checkpoint = emissions[-1].checkpoint
        group.ledger = dict(self._floors.offsets(checkpoint.ledger_from))
        group.state = dict(checkpoint.state)
        group.offsets |= checkpoint.low_water
        self._floors.written(self.log.transact([output for emission in emissions for output in emission.outputs]))

    def run(self, turns: int = 1) -> list[Output]:
        """Poll everything, fold and commit, `turns` times."""
        outputs: list[Output] = []
        for _ in range(turns):
            outputs += self.turn()
            self.commit()
        return outputs

    def crash(self) -> None:
        """Crash; pending emissions are lost."""
        if self.fold is not None:
            self.fold.close()
        self.fold = None
        self._waiting = []
