"""Which rows of a topic's records concern one trajectory. Columns are looked at; only what concerns it is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.log.chunks import Chunk
from schemas.block import Block
from schemas.identity import TrajectoryKey, trajectory_id


class Found(NamedTuple):
    """A record, where it stands, and when it was written in Unix milliseconds."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    record: Any


def concerning(chunk: Chunk, key: TrajectoryKey) -> Iterator[Found]:
    """The records of `chunk` that tell of trajectory `key`, in their order."""
    found: list[tuple[int, Any]] = []
    for kind, block in chunk.decoded.blocks.items():
        rows = pc.indices_nonzero(_mask(block, key)).to_pylist()
        if rows:
            whose = chunk.whose(kind)
            found += zip([whose[row] for row in rows], block.take(rows).records(), strict=True)
    records = chunk.records
    for at, record in sorted(found, key=lambda each: each[0]):
        yield Found(chunk.topic.noun, records.partition, records.offsets[at], records.timestamps[at], record)


def _mask(block: Block, key: TrajectoryKey) -> pa.Array:
    """Which rows of `block` tell of the trajectory: by its id, by the ids in a list, or by prompt and member."""
    names, wanted = block.batch.schema.names, trajectory_id(*key)
    if "trajectory_id" in names:
        return pc.equal(block.column("trajectory_id"), wanted)
    prefix = next((prefix for prefix in ("", "trajectory.") if f"{prefix}prompt.number" in names), None)
    if prefix is not None:
        return pc.and_(
            _of_prompt(block, f"{prefix}prompt.", key), pc.equal(block.column(f"{prefix}member"), key.member)
        )
    if "number" in names and "purpose" in names:
        return _of_prompt(block, "", key)
    if "trajectory_ids" in names:
        lists = block.column("trajectory_ids")
        hits = pc.equal(lists.flatten(), wanted)
        counts = pc.list_parent_indices(lists).filter(hits)
        return pc.is_in(pa.arange(0, len(block)), value_set=counts.cast(pa.int64()))
    if "moves" in names:
        return pa.array([any(wanted in move.trajectory_ids for move in plan.moves) for plan in block.records()])
    return pa.array([False] * len(block))


def _of_prompt(block: Block, prefix: str, key: TrajectoryKey) -> pa.Array:
    return pc.and_(
        pc.equal(block.column(f"{prefix}number"), key.number), pc.equal(block.column(f"{prefix}purpose"), key.purpose)
    )
