"""The number of shards of a role: its notes record it, and a start with another one is rejected.

Each shard has a share of the partitions. A process with another number would read partitions that another shard has
consumed, so a new number needs new notes, see `resharding`.
"""

from __future__ import annotations

from collections.abc import Mapping

from kafka import KafkaConsumer, TopicPartition

from infra.kafka.log_gaps import CannotResume
from infra.kafka.note import Note, last_notes
from infra.kafka.session_config import Partition, SessionConfig


class OtherLayout(CannotResume):
    """The notes of a role are of another number of shards than its configuration."""


def role_prefix(group: str) -> str:
    """What the groups of all shards of the role of `group` begin with."""
    return group.rpartition(".")[0] + "."


def shard_of(group: str) -> int:
    """The number of the shard of `group`."""
    return int(group.rpartition(".")[2])


def check_layout(observer: KafkaConsumer, config: SessionConfig, note: Note | None) -> None:
    """Raise OtherLayout unless `note`, the last one of the shard, is of the layout of `config`.

    A shard without a note compares itself with the others. A session that retires its shard may find a sealed note.
    """
    if note is None:
        numbered = role_notes(observer, config.restore, role_prefix(config.group))
        if not numbered:
            return
        note = numbered[min(numbered)]  # each change of the layout writes the notes of the first shards
    if note.shards != config.shards or (note.sealed and not config.retires):
        state = f"{note.shards}, and is being changed" if note.sealed else str(note.shards)
        raise OtherLayout(
            f"{config.group}: the role's number of shards is {state}, according to its last commit, but "
            f"{config.shards} here: `laminar runs resume --set ROLE.shards=NUMBER` of the stopped run, or "
            f"`laminar submit ROLE` of all shards or of the first one, changes it; or set it back"
        )


def role_notes(observer: KafkaConsumer, restore: Partition, prefix: str, *, undecided: bool = False) -> dict[int, Note]:
    """The last notes of a role by shard; its groups begin with `prefix`. Otherwise as `last_notes`."""
    found = last_notes(observer, TopicPartition(*restore), prefix, undecided=undecided)
    return {shard_of(group): note for group, note in found.items() if is_shard(group)}


def is_shard(group: str) -> bool:
    """Whether `group` is that of a shard, not another group whose name begins like the role's."""
    return group.rpartition(".")[2].isdecimal()


def layout_of(notes: Mapping[int, Note]) -> int:
    """The number of shards, from the notes by shard, one or more."""
    return notes[min(notes)].shards
