"""The commit notes of the shards and ranks that a run has now: those that have ended leave their last ones for ever."""

from __future__ import annotations

from collections.abc import Mapping

from infra.kafka.note import Note
from infra.kafka.shard_layout import is_shard, role_prefix, shard_of

TRAINER = ".trainer."


def present_notes(notes: Mapping[str, Note]) -> dict[str, Note]:
    """`notes`, by group, without those of shards and ranks that a change of their number has ended."""
    return {group: note for group, note in notes.items() if not (is_shard(group) and _has_ended(notes, group))}


def _has_ended(notes: Mapping[str, Note], group: str) -> bool:
    """Whether `group` is a sealed shard beyond the present number, or a rank whose partitions lower ranks read now."""
    prefix, number, note = role_prefix(group), shard_of(group), notes[group]
    first = notes.get(f"{prefix}0")
    if number == 0 or first is None:
        return False
    if not prefix.endswith(TRAINER):
        return note.sealed and number >= first.shards
    lower = (notes.get(f"{prefix}{rank}", Note()).offsets for rank in range(number))
    return bool(note.offsets) and note.offsets.keys() <= {place for offsets in lower for place in offsets}
