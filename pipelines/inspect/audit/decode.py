"""Decoding for the audit: of records about a trajectory only the key; other columns are only validated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from infra.kafka.topic_reader import class_of
from schemas.block_codec import decode_block
from schemas.codec import decode
from schemas.identity import TrajectoryKey
from schemas.records import Assignment, Experience, Trajectory

_PREFIXES: Mapping[type, str] = {Assignment: "", Trajectory: "", Experience: "trajectory."}
_BY_NAME = {kind.__name__: kind for kind in _PREFIXES}


class DecodedRecord(NamedTuple):
    """A record of class `kind` about trajectory `key`."""

    kind: type
    key: TrajectoryKey


def decode_for_audit(value: bytes | None, headers: Iterable[tuple[str, bytes]]) -> list[Any]:
    """The records in `value`; those about one trajectory as `DecodedRecord`. Raises UndecodableRecord."""
    headers = tuple(headers)
    kind = _BY_NAME.get(class_of(headers))
    if kind is None:
        return decode(value, headers)
    block, prefix = decode_block(value, headers), _PREFIXES[kind]
    columns = (block.column(prefix + name).to_pylist() for name in ("prompt.purpose", "prompt.number", "member"))
    return [DecodedRecord(kind, TrajectoryKey(*row)) for row in zip(*columns, strict=True)]
