"""Gaps: records that a shard still needs and Kafka no longer has. A gap always ends the process with an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kafka import TopicPartition
from kafka.errors import UnknownTopicOrPartitionError

from infra.kafka.note import name_of, read_to_end
from infra.kafka.record_batches import RecordBatch, known_partitions
from infra.kafka.session_config import Partition, SessionConfig
from schemas.codec import Headers, UndecodableRecord, decode
from schemas.records import ReplicaStatus
from schemas.release import OldRelease

NEW_RUN = (
    "begin a new run from the last checkpoint: `laminar weights pull VERSION FOLDER` writes it as a model "
    "for model.path"
)
"""The advice where a log cannot be restored."""


class CannotResume(RuntimeError):
    """A shard cannot resume from its last commit. A retry does not help: an operator must act."""


class LogTruncated(CannotResume):
    """Records that the shard still needs are no longer in the log."""


class NoteMissing(CannotResume):
    """The shard has written records before, but its last note is gone."""


def log_truncated(group: str, reason: str) -> LogTruncated:
    """The error of `group`; `reason` names the log and the offset at which it begins or ends."""
    return LogTruncated(
        f"{group}: {reason}. Unprocessed records are gone: retention deleted them, or the topic was "
        "deleted and created again. Set retention.ms=-1 and retention.bytes=-1 on the run's topics (`laminar "
        f"doctor` checks them), and restore the topic from a backup, or {NEW_RUN}"
    )


def note_missing(group: str, restore: str, traces: Sequence[str]) -> NoteMissing:
    """The error of `group`; `traces` are sentences about what it has left elsewhere."""
    deleted = (
        f"If the topics of an earlier run of this name were deleted on purpose, delete its consumer group {group}, too"
    )
    return NoteMissing(
        f"{group} has no note in {restore}, but {'; '.join(traces)}: a start without it would assign all numbers "
        f"again. Restore {restore} from a backup (its cleanup.policy must be compact only), or {NEW_RUN}."
        + (f" {deleted}" if any("committed offset" in trace for trace in traces) else "")
    )


def traces_of(
    observer: Any,
    config: SessionConfig,
    begins: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
    committed: Mapping[TopicPartition, int],
) -> list[str]:
    """What shows that a shard without a note has committed before; `committed` are the offsets of its group, and
    `observer` is a consumer of batches. Raises KafkaError.

    Each finds what the others miss: outputs may have other writers, and Kafka deletes a group's offsets after a week.
    """
    traces = [f"{name_of(p)} holds its output" for p in config.owned if ends[TopicPartition(*p)] > 0]
    traces += [f"{name_of(p)} has been trimmed" for p in config.ledger if begins[TopicPartition(*p)] > 0]
    traces += [f"its group has committed offset {o} in {name_of(p)}" for p, o in committed.items() if p in ends]
    if config.heartbeats is not None and (starts := _starts_with_heartbeats(observer, *config.heartbeats)):
        traces.append(f"{name_of(config.heartbeats.place)} holds a heartbeat of its start {max(starts)}")
    return traces


def _starts_with_heartbeats(observer: Any, place: Partition, run: str, process: int) -> list[int]:
    """The starts of a rollout process that sent the newest heartbeats of replicas. Raises KafkaError."""
    check_topics(observer, [TopicPartition(*place)])
    newest: dict[bytes | None, tuple[bytes | None, Headers]] = {}
    for found in read_to_end(observer, TopicPartition(*place), None):
        if isinstance(found, RecordBatch):
            newest |= zip(found.keys, zip(found.values, found.headers, strict=True), strict=True)
    found_starts = []
    for value, headers in newest.values():
        with suppress(UndecodableRecord, OldRelease):  # of another program
            statuses = [each for each in decode(value, headers) if isinstance(each, ReplicaStatus)]
            found_starts += [each.incarnation for each in statuses if (each.run, each.process) == (run, process)]
    return found_starts


def check_topics(observer: Any, places: Collection[TopicPartition]) -> None:
    """Raise UnknownTopicOrPartitionError if Kafka has no topic of one of `places`; `observer` is a consumer.

    It is a KafkaError, after which the session is opened again: a broker that has just started may not know all topics.
    """
    known = {topic: known_partitions(observer, topic) for topic in {place.topic for place in places}}
    missing = {place.topic for place in places if place.partition not in known[place.topic]}
    if missing:
        raise UnknownTopicOrPartitionError(
            f"there is no topic {', '.join(sorted(missing))}. If the broker has not just started, the topic was "
            f"deleted: restore it from a backup, or {NEW_RUN}"
        )


def check_written(group: str, written: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> None:
    """Raise LogTruncated if a partition ends before the last record that the shard of `group` has written there."""
    for place, offset in written.items():
        if ends[place] <= offset:
            where = f"{place.topic}:{place.partition}"
            raise log_truncated(group, f"{where} ends at {ends[place]}, before its own output at {offset}")


def check_position(group: str, place: TopicPartition, offset: int, begin: int, end: int) -> None:
    """Raise LogTruncated if `offset` is not within `begin` and `end`, the offsets of the log."""
    where = f"{place.topic}, partition {place.partition},"
    if offset < begin:
        raise log_truncated(group, f"{where} begins at offset {begin}, after {offset}")
    if offset > end:
        raise log_truncated(group, f"{where} ends at offset {end}, before {offset}")
