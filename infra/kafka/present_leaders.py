"""Makes a start read from the present leaders of its own partitions.

A broker that is cut off from the others goes on answering those who take it for the leader, with what it had. Only a
write needs the present leader and its followers. A start that relied on such an answer would continue from an older
note, and write what it has written before. So it first writes a record to each partition that it reads back, in a
transaction that it aborts, and reads at least as far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from kafka import TopicPartition
from kafka.errors import KafkaTimeoutError

from infra.kafka.clients import SessionClients
from infra.kafka.log_gaps import check_topics
from infra.kafka.note import name_of

LEADER_S = 30.0
"""How long a start waits until brokers answer that have what is known to be written."""


def write_aborted(producer: Any, group: str, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """Write a record to each of `places` in a transaction that is aborted; return their offsets. Raises KafkaError."""
    places = list(dict.fromkeys(places))
    if not places:
        return {}
    producer.begin(places)
    sent = {place: producer.send(place.topic, b"", group.encode(), [], place.partition) for place in places}
    producer.flush()
    offsets = {place: future.get(timeout=0).offset for place, future in sent.items()}
    producer.abort_transaction()
    return offsets


def check_present(ends: Mapping[TopicPartition, int], written: Mapping[TopicPartition, int]) -> None:
    """Raise KafkaTimeoutError if a partition ends before what this start has just written, at offsets `written`."""
    for place, offset in written.items():
        if ends[place] <= offset:
            raise KafkaTimeoutError(
                f"a broker says that {place.topic}:{place.partition} ends at {ends[place]}, but {offset} has just been "
                "written: it is cut off from the others and no longer leads it"
            )


class LogBounds(NamedTuple):
    """The first offset of each partition and its end, open transactions included: own records may follow one."""

    begins: dict[TopicPartition, int]
    ends: dict[TopicPartition, int]


def read_bounds(
    observer: Any,
    another: Callable[[], AbstractContextManager[Any]],
    clients: SessionClients,
    places: Sequence[TopicPartition],
    reached: Mapping[str, int],
) -> LogBounds:
    """The bounds of `places`, as `observer` sees them. Raises KafkaError.

    While one ends before its offset in `reached`, by "topic:partition", `another` observer asks again, for LEADER_S: it
    may ask another broker.
    """
    deadline, bounds = clients.monotonic() + LEADER_S, _bounds_of(observer, places)
    while clients.monotonic() < deadline and any(bounds.ends[tp] < reached.get(name_of(tp), 0) for tp in places):
        clients.sleep(0.5)
        with another() as observer:
            bounds = _bounds_of(observer, places)
    return bounds


def _bounds_of(observer: Any, places: Sequence[TopicPartition]) -> LogBounds:
    check_topics(observer, places)
    return LogBounds(observer.beginning_offsets(places), observer.end_offsets(places)) if places else LogBounds({}, {})
