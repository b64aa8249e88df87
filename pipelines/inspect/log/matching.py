"""Selects the rows about one trajectory by their columns; only selected rows are converted to records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from infra.kafka.topic_reader import class_of
from pipelines.inspect.log.chunks import LogChunk
from schemas.arrow import arrow_schema
from schemas.block import Block
from schemas.codec import RECORD_TYPES, Headers
from schemas.identity import TrajectoryKey, trajectory_id


class MatchingRecord(NamedTuple):
    """A record, its position, and its timestamp in Unix milliseconds."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    record: Any


def may_match(key: TrajectoryKey) -> Callable[[bytes | None, Headers], bool]:
    """A filter of encoded records that may be about trajectory `key`: most are not, and need not be decoded."""
    wanted = trajectory_id(*key).encode()

    def may(value: bytes | None, headers: Headers) -> bool:
        return value is not None and (wanted in value or class_of(headers) in _WITHOUT_ID_TEXT)

    return may


def matching(chunk: LogChunk, key: TrajectoryKey) -> Iterator[MatchingRecord]:
    """The records of `chunk` about trajectory `key`, in their order."""
    found: list[tuple[int, Any]] = []
    for kind, block in chunk.decoded.blocks.items():
        rows = pc.indices_nonzero(_mask(block, key)).to_pylist()
        if rows:
            record_numbers = chunk.record_numbers(kind)
            found += zip([record_numbers[row] for row in rows], block.take(rows).records(), strict=True)
    records = chunk.records
    for at, record in sorted(found, key=lambda each: each[0]):
        yield MatchingRecord(
            chunk.topic.short_name, records.partition, records.offsets[at], records.timestamps[at], record
        )


def _mask(block: Block, key: TrajectoryKey) -> pa.Array:
    """The mask of rows of `block` about the trajectory: by its id, by a list of ids, or by prompt and member."""
    names, wanted = block.batch.schema.names, trajectory_id(*key)
    if "trajectory_id" in names:
        return pc.equal(block.column("trajectory_id"), wanted)
    prefix = _prompt_prefix(block.kind)
    if prefix is not None:
        member = prefix.replace("prompt.", "member")
        same_number = pc.equal(block.column(f"{prefix}number"), key.number)
        same_prompt = pc.and_(same_number, pc.equal(block.column(f"{prefix}purpose"), key.purpose))
        return pc.and_(same_prompt, pc.equal(block.column(member), key.member)) if member else same_prompt
    if "trajectory_ids" in names:
        lists = block.column("trajectory_ids")
        hits = pc.equal(lists.flatten(), wanted)
        counts = pc.list_parent_indices(lists).filter(hits)
        return pc.is_in(pa.arange(0, len(block)), value_set=counts.cast(pa.int64()))
    if "moves" in names:
        return pa.array([any(wanted in move.trajectory_ids for move in plan.moves) for plan in block.records()])
    return pa.array([False] * len(block))


def _prompt_prefix(kind: type) -> str | None:
    """The prefix of the columns that identify the prompt of a record of `kind`; None if it has none."""
    names = arrow_schema(kind).names
    found = (
        prefix
        for prefix in ("", "prompt.", "trajectory.prompt.")
        if {f"{prefix}number", f"{prefix}purpose"} <= {*names}
    )
    return next(found, None)


_WITHOUT_ID_TEXT = {entry.kind.__name__ for entry in RECORD_TYPES if _prompt_prefix(entry.kind) is not None}
"""Records that identify a trajectory by numbers of prompt and member; all others contain its id as text."""
