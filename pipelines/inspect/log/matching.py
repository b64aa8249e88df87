"""Which rows of a topic's records concern one trajectory. Columns are looked at; only what concerns it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from infra.kafka.reading import schema_of
from infra.kafka.record_batches import Headers
from pipelines.inspect.log.chunks import LogChunk
from schemas.arrow import arrow_schema
from schemas.block import Block
from schemas.codec import RECORD_TYPES
from schemas.identity import TrajectoryKey, trajectory_id


class MatchingRecord(NamedTuple):
    """A record, where it stands, and when it was written in Unix milliseconds."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    record: Any


def may_match(key: TrajectoryKey) -> Callable[[bytes | None, Headers], bool]:
    """Tells of an encoded record whether it may be of trajectory `key`: most are not, and need not be decoded."""
    wanted = trajectory_id(*key).encode()

    def may(value: bytes | None, headers: Headers) -> bool:
        return value is not None and (wanted in value or schema_of(headers) in _IN_NUMBERS)

    return may


def matching(chunk: LogChunk, key: TrajectoryKey) -> Iterator[MatchingRecord]:
    """The records of `chunk` that tell of trajectory `key`, in their order."""
    found: list[tuple[int, Any]] = []
    for kind, block in chunk.decoded.blocks.items():
        rows = pc.indices_nonzero(_mask(block, key)).to_pylist()
        if rows:
            whose = chunk.whose(kind)
            found += zip([whose[row] for row in rows], block.take(rows).records(), strict=True)
    records = chunk.records
    for at, record in sorted(found, key=lambda each: each[0]):
        yield MatchingRecord(
            chunk.topic.short_name, records.partition, records.offsets[at], records.timestamps[at], record
        )


def _mask(block: Block, key: TrajectoryKey) -> pa.Array:
    """Which rows of `block` tell of the trajectory: by its id, by the ids in a list, or by prompt and member."""
    names, wanted = block.batch.schema.names, trajectory_id(*key)
    if "trajectory_id" in names:
        return pc.equal(block.column("trajectory_id"), wanted)
    prefix = _prompt_prefix(block.kind)
    if prefix is not None:
        ours, member = _of_prompt(block, prefix, key), prefix.replace("prompt.", "member")
        return pc.and_(ours, pc.equal(block.column(member), key.member)) if member else ours
    if "trajectory_ids" in names:
        lists = block.column("trajectory_ids")
        hits = pc.equal(lists.flatten(), wanted)
        counts = pc.list_parent_indices(lists).filter(hits)
        return pc.is_in(pa.arange(0, len(block)), value_set=counts.cast(pa.int64()))
    if "moves" in names:
        return pa.array([any(wanted in move.trajectory_ids for move in plan.moves) for plan in block.records()])
    return pa.array([False] * len(block))


def _prompt_prefix(kind: type) -> str | None:
    """What stands before the columns that say which prompt a record of `kind` is of; None where there are none."""
    names = arrow_schema(kind).names
    found = (
        prefix
        for prefix in ("", "prompt.", "trajectory.prompt.")
        if {f"{prefix}number", f"{prefix}purpose"} <= {*names}
    )
    return next(found, None)


_IN_NUMBERS = {entry.schema for entry in RECORD_TYPES if _prompt_prefix(entry.kind) is not None}
"""What says whose it is by the numbers of prompt and member; in all else a trajectory's id stands as it is."""


def _of_prompt(block: Block, prefix: str, key: TrajectoryKey) -> pa.Array:
    return pc.and_(
        pc.equal(block.column(f"{prefix}number"), key.number), pc.equal(block.column(f"{prefix}purpose"), key.purpose)
    )
