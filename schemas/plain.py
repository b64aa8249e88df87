"""JSON encoding of the small control records, so that any Kafka tool can read them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pyarrow as pa

from schemas.shape import Field, fields_of


def to_plain(record: Any) -> dict[str, Any]:
    """`record` as JSON-ready dictionaries, lists and scalars; policy versions as "epoch.number"; bytes in base64."""
    return {field.name: _to_plain(getattr(record, field.name)) for field in fields_of(type(record))}


def encode_json(record: Any) -> bytes:
    """`record` as compact UTF-8 JSON. Raises ValueError for NaN and infinities."""
    return json.dumps(to_plain(record), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def decode_json(kind: type, data: bytes) -> Any:
    """The `kind` in `data`. Raises ValueError naming the field that is missing, unknown or of the wrong type."""
    try:
        value = json.loads(data, parse_constant=_no_constant)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{kind.__name__}: not JSON ({error})") from error
    return from_plain(kind, value)


def from_plain(kind: type, value: Any) -> Any:
    """The `kind` that `to_plain` made `value` of. Raises ValueError."""
    if hasattr(kind, "parse") and isinstance(value, str):
        return kind.parse(value)
    if not isinstance(value, dict):
        raise ValueError(f"{kind.__name__}: expected an object, got {type(value).__name__}")
    fields = fields_of(kind)
    unknown = value.keys() - {field.name for field in fields}
    if unknown:
        raise ValueError(f"{kind.__name__}: unknown fields {sorted(unknown)}")
    missing = [field.name for field in fields if field.name not in value and not field.optional]
    if missing:
        raise ValueError(f"{kind.__name__}: missing fields {missing}")
    return kind(*(_from_plain(kind, field, value.get(field.name)) for field in fields))


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not allowed")


def _to_plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "parse"):
        return str(value)
    if hasattr(value, "__dataclass_fields__"):
        return to_plain(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {name: _to_plain(item) for name, item in value.items()}
    if isinstance(value, pa.Array):
        return value.to_pylist()
    return [_to_plain(item) for item in value]


def _from_plain(kind: type, field: Field, value: Any) -> Any:
    where = f"{kind.__name__}.{field.name}"
    if value is None:
        if field.optional:
            return None
        raise ValueError(f"{where} is null")
    if field.kind == "record":
        return from_plain(field.of, value)
    if field.kind == "array":
        try:
            return pa.array(value, field.of)
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise ValueError(f"{where}: {error}") from error
    if field.kind == "tuple":
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list, got {type(value).__name__}")
        return tuple(_item(where, field.of, item) for item in value)
    if field.kind == "mapping":
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected an object, got {type(value).__name__}")
        return {name: _item(where, field.of, item) for name, item in value.items()}
    if field.choices is not None and value not in field.choices:
        raise ValueError(f"{where}: {value!r} is not one of {sorted(field.choices)}")
    return _item(where, field.of, value)


def _item(where: str, of: Any, value: Any) -> Any:
    if hasattr(of, "__dataclass_fields__"):
        return from_plain(of, value)
    if of is bytes and isinstance(value, str):
        return base64.b64decode(value, validate=True)
    if of is float and type(value) is int:
        return float(value)
    if of is int and type(value) is bool or not isinstance(value, of):
        raise ValueError(f"{where}: expected {of.__name__}, got {type(value).__name__}")
    return value
