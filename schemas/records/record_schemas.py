"""The schema of a record class, for readers that do not have this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SchemaField:
    """A field of a record: an Arrow column or a JSON member. Dots in `name` lead into nested records."""

    name: str
    type: str
    nullable: bool


@dataclass(frozen=True, slots=True)
class RecordSchema:
    """How values with the header `laminar-schema` = `schema` are encoded.

    Written by every start of `laminar run` and `laminar submit`; read by other programs. `arrow` is an Arrow IPC stream
    without batches, which holds the schema of the record batch messages; empty for JSON.
    """

    schema: str
    encoding: Literal["arrow", "json"]
    fields: tuple[SchemaField, ...]
    arrow: bytes
