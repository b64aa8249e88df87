"""Random calls on a cluster: what several producers of two transactional.ids do, fenced and repeated requests included.

The same numbers lead to the same calls on every cluster, whatever producer ids it assigns.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from infra.simulation.cluster import Place
from infra.simulation.errors import BrokerError
from infra.simulation.partition import ProducerKey

IDS = ("score", "experience")
GROUPS = ("readers",)


class Cluster(Protocol):
    """What SimulatedCluster and RawKafka have in common."""

    def init_producer_id(self, transactional_id: str, timeout_s: float = ...) -> ProducerKey: ...
    def add_partitions(self, transactional_id: str, producer: ProducerKey, places: Sequence[Place]) -> None: ...
    def add_offsets(self, transactional_id: str, producer: ProducerKey, group: str) -> None: ...
    def produce(
        self, place: Place, values: Sequence[bytes], producer: ProducerKey, transactional_id: str, sequence: int
    ) -> int: ...
    def send(self, place: Place, values: Sequence[bytes]) -> int: ...
    def commit_offsets(
        self, transactional_id: str, group: str, producer: ProducerKey, offsets: Mapping[Place, int]
    ) -> None: ...
    def delete_before(self, place: Place, offset: int) -> None: ...
    def read(self, place: Place) -> object: ...
    def end_transaction(self, transactional_id: str, producer: ProducerKey, *, commit: bool) -> None: ...


@dataclass(frozen=True)
class Call:
    """A request by the `producer`-th start of an id (for others: -1)."""

    name: str
    transactional_id: str = ""
    start: int = -1
    place: Place | None = None
    sequence: int = 0
    values: tuple[bytes, ...] = ()
    number: int = 0
    commit: bool = False


@dataclass
class Caller:
    """Draws calls with `seed`, and remembers the sequence numbers that each start has used."""

    seed: int
    places: Sequence[Place]
    starts: dict[str, int] = field(default_factory=dict)
    sequences: dict[tuple[str, int, Place], int] = field(default_factory=dict)
    sent: list[Call] = field(default_factory=list)

    def calls(self, count: int) -> Iterator[Call]:
        """Yield `count` calls; the caller reports each produced batch that was accepted to `accepted`."""
        draw = random.Random(self.seed)
        for number in range(count):
            yield self._next(draw, number)

    def accepted(self, call: Call) -> None:
        """Advance the sequence number after a batch that the broker appended."""
        assert call.place is not None
        where = call.transactional_id, call.start, call.place
        if call.sequence == self.sequences.get(where, 0):
            self.sequences[where] = call.sequence + len(call.values)

    def _next(self, draw: random.Random, number: int) -> Call:
        name = draw.choice(IDS)
        newest = self.starts.get(name, -1)
        if newest < 0 or draw.random() < 0.04:
            self.starts[name] = newest + 1
            return Call("init", name)
        start = newest if draw.random() < 0.9 else draw.randint(max(0, newest - 2), newest)
        place = draw.choice(self.places)
        kind = draw.choices(
            ("add", "produce", "commit", "abort", "send", "add offsets", "offsets", "repeat", "delete", "read"),
            (18, 34, 14, 5, 8, 6, 8, 7, 1, 4),
        )[0]
        if kind == "repeat" and self.sent:
            return draw.choice(self.sent[-8:])
        if kind in ("produce", "repeat"):
            known = self.sequences.get((name, start, place), 0)
            sequence = max(0, known + (0 if draw.random() < 0.92 else draw.choice((-1, 1, 3))))
            values = tuple(b"%d.%d" % (number, index) for index in range(draw.randint(1, 3)))
            call = Call("produce", name, start, place, sequence, values)
            self.sent.append(call)
            return call
        if kind == "read":
            return Call("read", place=place)
        if kind == "send":
            return Call("send", place=place, values=(b"%d" % number,))
        if kind == "delete":
            return Call("delete", place=place, number=draw.randint(0, number))
        if kind in ("commit", "abort"):
            return Call("end", name, start, commit=kind == "commit")
        return Call(kind, name, start, place, number=number)


@dataclass
class Applied:
    """The calls as applied to one cluster, with the producers that it has assigned."""

    cluster: Any
    producers: dict[tuple[str, int], ProducerKey] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)

    def apply(self, call: Call) -> object:
        """The response: an offset, an error's name, or None."""
        try:
            return self._apply(call)
        except BrokerError as error:
            return type(error).__name__

    def _apply(self, call: Call) -> object:
        cluster, name = self.cluster, call.transactional_id
        if call.name == "init":
            start = self.starts[name] = self.starts.get(name, -1) + 1
            self.producers[name, start] = cluster.init_producer_id(name)
            return None
        if call.name == "read":
            return cluster.read(call.place)
        if call.name == "send":
            return cluster.send(call.place, call.values)
        if call.name == "delete":
            return cluster.delete_before(call.place, call.number)
        producer = self.producers[name, call.start]
        if call.name == "add":
            return cluster.add_partitions(name, producer, [call.place])
        if call.name == "produce":
            return cluster.produce(call.place, call.values, producer, name, call.sequence)
        if call.name == "end":
            return cluster.end_transaction(name, producer, commit=call.commit)
        if call.name == "add offsets":
            return cluster.add_offsets(name, producer, GROUPS[0])
        return cluster.commit_offsets(name, GROUPS[0], producer, {call.place: call.number})
