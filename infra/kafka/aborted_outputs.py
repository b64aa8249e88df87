"""Whether the outputs that a commit note names are committed, too: another program may have aborted their part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kafka import TopicPartition
from kafka.errors import KafkaTimeoutError

from infra.kafka.client_patches import position_in
from infra.kafka.log_gaps import NEW_RUN, CannotResume
from infra.kafka.note import MAX_IDLE_POLLS, POLL_MS, place_of
from infra.kafka.record_batches import Marker


class OutputAborted(CannotResume):
    """A commit note is valid, but outputs of its transaction were aborted."""


def check_outputs(observer: Any, group: str, written: Mapping[str, int]) -> None:
    """Check the outputs in `written`, offsets by "topic:partition". Raises OutputAborted, KafkaTimeoutError.

    It reads from each to the end of its transaction, all partitions at once.
    """
    offsets = {TopicPartition(*place_of(name)): offset for name, offset in written.items()}
    for place in _aborted(observer, offsets) if offsets else ():
        raise OutputAborted(
            f"{group}: its output at offset {offsets[place]} of {place.topic}, partition {place.partition}, was "
            f"aborted, but the note of the same transaction was committed: the output is lost. Let only administrators "
            f"end transactions (`laminar topics transactions abort`), and {NEW_RUN}"
        )


def _aborted(observer: Any, offsets: Mapping[TopicPartition, int]) -> Iterator[TopicPartition]:
    """The partitions whose record at its offset was aborted; not those in which compaction has removed it, or its end
    is not known yet.
    """
    begins, ends = observer.beginning_offsets(list(offsets)), observer.end_offsets(list(offsets))
    followed = {place: _Output(offset) for place, offset in offsets.items() if offset < ends[place]}
    observer.assign(list(followed))
    for place in followed:
        observer.seek(place, max(begins[place], offsets[place]))
    idle = 0
    while followed := {
        place: output
        for place, output in followed.items()
        if (position_in(observer, place, POLL_MS) or 0) < ends[place]
    }:
        observer.assign(list(followed))  # the others are not read any further
        polled = observer.poll(timeout_ms=POLL_MS)
        idle = 0 if polled else idle + 1
        if idle > MAX_IDLE_POLLS:
            raise KafkaTimeoutError(f"{', '.join(sorted({place.topic for place in followed}))} cannot be read")
        for place, records in polled.items():
            outcomes = (followed[place].follow(record.value) for record in records)
            if (committed := next((outcome for outcome in outcomes if outcome is not None), None)) is not None:
                del followed[place]
                if not committed:
                    yield place


class _Output:
    """An output, whose end is looked for in what follows it in its partition."""

    def __init__(self, offset: int) -> None:
        self._offset = offset
        self._producer_id: int | None = None

    def follow(self, found: Any) -> bool | None:
        """Whether it counts as committed, by the next batch or marker; None if that does not show it."""
        if isinstance(found, Marker):
            return found.committed if found.producer_id == self._producer_id else None
        if self._producer_id is None:
            if not found.transactional or self._offset not in found.offsets:
                return True
            self._producer_id = found.producer_id
        return None
