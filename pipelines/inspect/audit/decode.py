"""Decoding for the audit: of records about a trajectory only the key; other columns are only validated.

Records that no role accepts (see `operators.io.validation`) are None: they must neither end the audit nor count in it.
Manifests are validated by the reader, which knows those before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from infra.kafka.topic_reader import class_of
from operators.io.validation import MAX_COUNT, invalid_reason, invalid_rows
from schemas.block_codec import decode_block
from schemas.codec import decode
from schemas.identity import PURPOSES, TrajectoryKey, is_trajectory_id
from schemas.records import Assignment, Experience, MicroBatch, Trajectory, WeightVersion

_PREFIXES: Mapping[type, str] = {Assignment: "", Trajectory: "", Experience: "trajectory."}
_BY_NAME = {kind.__name__: kind for kind in _PREFIXES}
_COLUMNS = ("prompt.purpose", "prompt.number", "member")
_PURPOSES = frozenset(PURPOSES.values())


class DecodedRecord(NamedTuple):
    """A record of class `kind` about trajectory `key`."""

    kind: type
    key: TrajectoryKey


def decode_for_audit(value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> list[Any]:
    """The records in `value`; those about one trajectory as `DecodedRecord`, invalid ones as None.

    Raises UndecodableRecord.
    """
    headers = tuple(headers)
    kind = _BY_NAME.get(class_of(headers))
    if kind is None:
        return [each for row in decode(value, headers) for each in _valid(row)]
    block, prefix = decode_block(value, headers), _PREFIXES[kind]
    invalid = set(invalid_rows(block))
    keys = zip(*(block.column(prefix + name).to_pylist() for name in _COLUMNS), strict=True)
    return [
        None if row in invalid or key[0] not in _PURPOSES else DecodedRecord(kind, TrajectoryKey(*key))
        for row, key in enumerate(keys)
    ]


def _valid(row: Any) -> Iterator[Any]:
    """`row`, and None if it is invalid, or a micro-batch some of whose trajectories have invalid ids."""
    if not isinstance(row, MicroBatch):
        yield row if isinstance(row, WeightVersion) or invalid_reason(row) is None else None
        return
    names = tuple(filter(is_trajectory_id, row.trajectory_ids))
    is_numbered = 0 <= row.batch <= MAX_COUNT
    if is_numbered:
        yield row if len(names) == len(row.trajectory_ids) else replace(row, trajectory_ids=names)
    if not is_numbered or len(names) < len(row.trajectory_ids):
        yield None
