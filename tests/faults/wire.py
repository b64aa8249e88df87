"""Decodes values by the layout in the golden files, without code of the product.

A golden file lists the fields of a schema in their order on the wire. A nested record is flattened to dotted columns;
a tuple of records is a list of structs.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

GOLDEN = Path(__file__).parents[1] / "schemas" / "golden"
_SCALARS = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_(), "bytes": pa.binary()}
_ITEMS = {"int32": pa.int32(), "int64": pa.int64(), "float": pa.float32(), "bool": pa.bool_()}


def rows_of(value: bytes, headers: dict[str, bytes | None]) -> tuple[str, list[dict[str, Any]]]:
    """The name of the record class in `value` ("Settled"), and its rows by field. Raises KeyError, ValueError."""
    schema = (headers["laminar-schema"] or b"").decode()
    name = schema.partition("/")[0]
    if headers["content-type"] == b"application/json":
        return name, [json.loads(value)]
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(value)), _schema(schema.replace("/", "-")))
    return name, batch.to_pylist()


@cache
def _schema(golden: str) -> pa.Schema:
    lines = json.loads((GOLDEN / f"{golden}.json").read_text())["fields"]
    fields = dict(line.split(": ", 1) for line in lines)
    return pa.schema([(name, kind) for name, kind in _columns(fields, "")])


def _columns(fields: dict[str, str], prefix: str) -> list[tuple[str, pa.DataType]]:
    columns: list[tuple[str, pa.DataType]] = []
    for name, kind in fields.items():
        if not name.startswith(prefix) or "." in name.removeprefix(prefix):
            continue
        shape, _, rest = kind.partition(" of ")
        of = rest.split(" ")[0]
        if shape == "record":
            columns += _columns(fields, f"{name}.")
        elif shape == "scalar":
            columns.append((name, _SCALARS[of]))
        elif shape == "array":
            columns.append((name, pa.list_(_ITEMS[of])))
        elif of in _SCALARS:
            columns.append((name, pa.list_(_SCALARS[of])))
        else:
            columns.append((name, pa.list_(_struct(fields, f"{name}."))))
    return columns


def _struct(fields: dict[str, str], prefix: str) -> pa.DataType:
    inner = []
    for name, kind in fields.items():
        if name.startswith(prefix) and "." not in name.removeprefix(prefix):
            shape, _, rest = kind.partition(" of ")
            of = rest.split(" ")[0]
            inner.append(
                (name.removeprefix(prefix), _struct(fields, f"{name}.") if shape == "record" else _SCALARS[of])
            )
    return pa.struct(inner)
