"""Conditions on the columns of a row, which select the rows of a table and of a curriculum level."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from infra.name_lookup import suggest_name

_ENDS = ("least", "below")


def column_value(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, None if missing. Dots select struct fields, unless a column has the whole name."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def matches(row: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """Whether `row` matches the conditions `where`, by column (see TaskConfig.where)."""
    return all(_fits(column_value(row, column), wanted) for column, wanted in where.items())


def check_condition(column: str, wanted: Any) -> None:
    """Raise ValueError if `wanted` is not a valid condition on `column`."""
    if not isinstance(wanted, Mapping):
        return
    for end, value in wanted.items():
        if end not in _ENDS:
            raise ValueError(f"{column}: unknown range key {end!r}{suggest_name(end, _ENDS)}")
        if not _is_number(value):
            raise ValueError(f"{column}: {end} must be a number, not {value!r}")
    if not wanted or ("least" in wanted and "below" in wanted and not wanted["least"] < wanted["below"]):
        raise ValueError(f"{column}: the range {dict(wanted)} is empty")


def _fits(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return _is_number(value) and bool(wanted.get("least", -math.inf) <= value < wanted.get("below", math.inf))
    return value in wanted if isinstance(wanted, list | tuple) else bool(value == wanted)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
