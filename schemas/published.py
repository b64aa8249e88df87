"""The schemas of all records as records themselves, for the topic `schemas` and `laminar topics schema`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from schemas.arrow import arrow_schema
from schemas.codec import RecordType
from schemas.records import RecordSchema, SchemaField
from schemas.shape import fields_of


def record_schema(entry: RecordType) -> RecordSchema:
    if entry.encoding == "json":
        return RecordSchema(entry.schema, "json", tuple(_json_fields(entry.kind, "")), b"")
    schema = arrow_schema(entry.kind)
    columns = tuple(SchemaField(column.name, str(column.type), column.nullable) for column in schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema):
        pass
    return RecordSchema(entry.schema, "arrow", columns, sink.getvalue().to_pybytes())


def _json_fields(kind: Any, prefix: str) -> Iterator[SchemaField]:
    for field in fields_of(kind):
        kind_name = getattr(field.of, "__name__", str(field.of))
        text = kind_name if field.kind == "scalar" else f"{field.kind} of {kind_name}"
        yield SchemaField(prefix + field.name, text, field.optional)
        if hasattr(field.of, "__dataclass_fields__"):
            yield from _json_fields(field.of, f"{prefix}{field.name}.")
