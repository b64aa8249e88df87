"""Whether the outputs of commits are committed, too: another program may have aborted their part of a transaction.

Kafka lets an administrator end a transaction in one partition. The producer does not learn of it: its next records
there are accepted, and its commit succeeds. So the outcome of each commit is read in each partition, from the marker
that follows its last record there. An output whose record compaction has removed counts as committed: its outcome is
not known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kafka import TopicPartition
from kafka.errors import KafkaTimeoutError

from infra.kafka.client_patches import fetch_at_most, offsets_by_topic, position_in
from infra.kafka.log_gaps import NEW_RUN, CannotResume, check_topics
from infra.kafka.note import MAX_IDLE_POLLS, POLL_MS, name_of, place_of
from infra.kafka.record_batches import Marker

FETCH_BYTES = 1 << 16
"""How much of a partition is fetched at once: between two outputs there may be many records of others."""
NEAR = 500
"""The next output is read on to if it is at most so many offsets, and about FETCH_BYTES, away; else it is sought."""


class OutputAborted(CannotResume):
    """A transaction was committed, but outputs of it were aborted."""


class Outcomes(NamedTuple):
    """Outputs that were aborted; those that have no end yet, as `written` of `read_outcomes`."""

    aborted: list[tuple[TopicPartition, int]]
    undecided: dict[str, list[int]]


def output_aborted(group: str, place: TopicPartition, offset: int) -> OutputAborted:
    """The error of `group`, whose output at `offset` was aborted."""
    return OutputAborted(
        f"{group}: its output at offset {offset} of {place.topic}, partition {place.partition}, was aborted, but its "
        f"transaction was committed: the output is lost. Let only administrators end transactions (`laminar topics "
        f"transactions abort`), and {NEW_RUN}"
    )


def check_outputs(observer: Any, group: str, written: Mapping[str, Sequence[int]]) -> None:
    """Check the outputs in `written`, see `read_outcomes`. Raises OutputAborted, KafkaError."""
    for place, offset in read_outcomes(observer, written).aborted:
        raise output_aborted(group, place, offset)


def read_outcomes(observer: Any, written: Mapping[str, Sequence[int]]) -> Outcomes:
    """The outcomes of the outputs in `written`: ascending offsets by "topic:partition", one of each transaction of a
    shard. `observer` is a consumer of batches and markers.

    It reads from each output to the end of its transaction, all partitions at once. Raises KafkaError.
    """
    followed = {TopicPartition(*place_of(name)): _Outputs(offsets) for name, offsets in written.items() if offsets}
    aborted: list[tuple[TopicPartition, int]] = []
    if not followed:
        return Outcomes(aborted, {})
    check_topics(observer, list(followed))
    fetch_at_most(observer, FETCH_BYTES)
    begins, ends = (offsets_by_topic(ask, followed) for ask in (observer.beginning_offsets, observer.end_offsets))
    reading = {place: outputs for place, outputs in followed.items() if outputs.next < ends[place]}
    observer.assign(list(reading))
    for place, outputs in reading.items():
        observer.seek(place, max(begins[place], outputs.next))
    idle, sizes = 0, dict.fromkeys(reading, 0.0)
    while reading:
        polled = observer.poll(timeout_ms=POLL_MS)
        idle = 0 if polled else idle + 1
        if idle > MAX_IDLE_POLLS:
            raise KafkaTimeoutError(f"{', '.join(sorted({place.topic for place in reading}))} cannot be read")
        for place, records in polled.items():
            found = [record.value for record in records]
            aborted += ((place, offset) for offset in reading[place].follow(found))
            sizes[place] = _record_bytes(found)
        ended = False
        for place, outputs in list(reading.items()):
            position = position_in(observer, place, POLL_MS) or 0
            if not outputs.left or max(position, outputs.next) >= ends[place]:
                del reading[place]
                ended = True
            elif (gap := outputs.next - position) > NEAR or gap * sizes[place] > FETCH_BYTES:
                observer.seek(place, outputs.next)
        if ended and reading:
            observer.assign(list(reading))  # the others are not read any further
    return Outcomes(aborted, {name_of(place): list(outputs.left) for place, outputs in followed.items()})


def _record_bytes(found: Sequence[Any]) -> float:
    """The mean size in bytes of the records in batches and markers."""
    size = sum(len(value or b"") for each in found if not isinstance(each, Marker) for value in each.values)
    return size / max(1, sum(map(len, found)))


class _Outputs:
    """The outputs of a shard in one partition, whose ends are looked for in order, in what follows them."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self.left = deque(offsets)
        """Those whose end has not been read."""
        self._producer_id: int | None = None
        """The producer of the first one left, once that has been read."""

    @property
    def next(self) -> int:
        """The offset of the first one left."""
        return self.left[0]

    def follow(self, values: Iterable[Any]) -> Iterator[int]:
        """The outputs that are aborted in the next batches and markers."""
        for found in values:
            if not self.left:
                return
            if isinstance(found, Marker):
                if found.producer_id == self._producer_id:
                    self._producer_id = None
                    offset = self.left.popleft()
                    if not found.committed:
                        yield offset
                continue
            while self._producer_id is None and self.left and self.next <= found.offsets[-1]:
                if found.transactional and self.next in found.offsets:
                    self._producer_id = found.producer_id
                else:
                    self.left.popleft()  # it was written without a transaction, or compaction has removed it
