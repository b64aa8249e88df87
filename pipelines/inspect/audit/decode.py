"""Decoding for the audit: of records about a trajectory only the key; other columns are only validated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from schemas.block_codec import decode_block
from schemas.codec import decode, record_type
from schemas.identity import TrajectoryKey
from schemas.records import Assignment, Experience, Trajectory

_PREFIXES: Mapping[type, str] = {Assignment: "", Trajectory: "", Experience: "trajectory."}
_BY_SCHEMA = {record_type(kind).schema.encode(): kind for kind in _PREFIXES}


class DecodedRecord(NamedTuple):
    """A record of class `kind` about trajectory `key`."""

    kind: type
    key: TrajectoryKey


def decode_for_audit(value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> list[Any]:
    """The records in `value`; those about one trajectory as `DecodedRecord`. Raises UndecodableRecord."""
    headers = tuple(headers)
    kind = next((_BY_SCHEMA.get(header) for name, header in headers if name == "laminar-schema"), None)
    if kind is None:
        return decode(value, headers)
    block, prefix = decode_block(value, headers), _PREFIXES[kind]
    columns = (block.column(prefix + name).to_pylist() for name in ("prompt.purpose", "prompt.number", "member"))
    return [DecodedRecord(kind, TrajectoryKey(*row)) for row in zip(*columns, strict=True)]
