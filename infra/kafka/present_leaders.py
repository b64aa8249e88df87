"""Makes a start read from the present leaders of its own partitions.

A broker that is cut off from the others goes on answering those who take it for the leader, with what it had. Only a
write needs the present leader and its followers. A start that relied on such an answer would continue from an older
note, and write what it has written before. So it first writes a record to each partition that it reads back, in a
transaction that it aborts, and reads at least as far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kafka import TopicPartition
from kafka.errors import KafkaTimeoutError

LEADER_S = 30.0
"""How long a start waits until brokers answer that have what is known to be written."""


def write_aborted(producer: Any, group: str, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """Write a record to each of `places` in a transaction that is aborted; return their offsets. Raises KafkaError."""
    places = list(places)
    producer.begin(places)
    sent = {
        place: producer.send(place.topic, b"", group.encode(), [], place.partition) for place in dict.fromkeys(places)
    }
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
