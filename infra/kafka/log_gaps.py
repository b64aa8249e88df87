"""Gaps: what a shard still needs and Kafka no longer has. A gap ends the process with an error, always."""

from __future__ import annotations

from kafka import TopicPartition


class CannotResume(RuntimeError):
    """A shard cannot go on from where it stood. Another try does not help: somebody must act."""


class LogTruncated(CannotResume):
    """Records that the shard still needs are no longer in the log."""


class NoteMissing(CannotResume):
    """The shard has written before, but its last note is gone."""


def log_truncated(group: str, what: str) -> LogTruncated:
    """The error of `group`; `what` says which log ends or begins where."""
    return LogTruncated(
        f"{group}: {what}. Records that were not processed are gone: retention deleted them, or the topic was "
        "deleted and created again. Set retention.ms=-1 and retention.bytes=-1 on the run's topics (`laminar "
        "doctor` checks them), and begin a new run from the last checkpoint, or restore the topic from a backup"
    )


def note_missing(group: str, restore: str, written: list[str]) -> NoteMissing:
    """The error of `group`, which has `written` to partitions that are its own."""
    return NoteMissing(
        f"{group} has no note in {restore}, but {', '.join(written)} holds its output: a start from nothing would "
        "number everything again. Restore the topic from a backup (its cleanup.policy must be compact alone), or "
        "begin a new run from the last checkpoint"
    )


def check_position(group: str, place: TopicPartition, offset: int, begin: int, end: int) -> None:
    """Raise LogTruncated where the log, which holds offsets `begin` to before `end`, cannot be read on at `offset`."""
    where = f"{place.topic}, partition {place.partition},"
    if offset < begin:
        raise log_truncated(group, f"{where} begins at offset {begin}, after {offset}")
    if offset > end:
        raise log_truncated(group, f"{where} ends at offset {end}, before {offset}")
