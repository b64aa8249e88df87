"""Gaps: records that a shard still needs and Kafka no longer has. A gap always ends the process with an error."""

from __future__ import annotations

from kafka import TopicPartition


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
        "doctor` checks them), and begin a new run from the last checkpoint, or restore the topic from a backup"
    )


def note_missing(group: str, restore: str, written: list[str]) -> NoteMissing:
    """The error of `group`, which has written to its own partitions `written`."""
    return NoteMissing(
        f"{group} has no note in {restore}, but {', '.join(written)} holds its output: a start without it would "
        "assign all numbers again. Restore the topic from a backup (its cleanup.policy must be compact only), or "
        "begin a new run from the last checkpoint"
    )


def check_position(group: str, place: TopicPartition, offset: int, begin: int, end: int) -> None:
    """Raise LogTruncated if `offset` is not within `begin` and `end`, the offsets of the log."""
    where = f"{place.topic}, partition {place.partition},"
    if offset < begin:
        raise log_truncated(group, f"{where} begins at offset {begin}, after {offset}")
    if offset > end:
        raise log_truncated(group, f"{where} ends at offset {end}, before {offset}")
