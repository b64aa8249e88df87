"""Whether the outputs that a commit note names are committed, too: another program may have aborted their part."""

from __future__ import annotations

from collections.abc import Mapping

from kafka import KafkaConsumer, TopicPartition

from infra.kafka.log_gaps import NEW_RUN, CannotResume, check_written
from infra.kafka.note import place_of, read_to_end
from infra.kafka.record_batches import Marker


class OutputAborted(CannotResume):
    """A commit note is valid, but outputs of its transaction were aborted."""


def check_outputs(observer: KafkaConsumer, group: str, written: Mapping[str, int]) -> None:
    """Check the outputs in `written`, offsets by "topic:partition". Raises LogTruncated, OutputAborted."""
    places = {TopicPartition(*place_of(name)): offset for name, offset in written.items()}
    if places:
        check_written(group, places, observer.end_offsets(list(places)))
    for place, offset in places.items():
        if _is_aborted(observer, place, offset):
            raise OutputAborted(
                f"{group}: its output at offset {offset} of {place.topic}, partition {place.partition}, was aborted, "
                f"but the note of the same transaction was committed: the output is lost. Let only administrators end "
                f"transactions (`laminar topics transactions abort`), and {NEW_RUN}"
            )


def _is_aborted(observer: KafkaConsumer, place: TopicPartition, offset: int) -> bool:
    """Whether the record at `offset` was aborted; False if compaction has removed it, or its end is not known yet."""
    producer_id: int | None = None
    for found in read_to_end(observer, place, offset):
        if isinstance(found, Marker):
            if found.producer_id == producer_id:
                return not found.committed
        elif producer_id is None:
            if not found.transactional or offset not in found.offsets:
                return False
            producer_id = found.producer_id
    return False
