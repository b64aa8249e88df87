"""Conditions on rows that are mappings, whose columns have no declared types."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from infra.conditions.grammar import Comparison, Condition, Value, parse_condition

_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TIME = re.compile(r"\d{4}-\d\d-\d\d")
"""How the texts begin that are compared as times."""


def row_matches(row: Mapping[str, Any], text: str) -> bool:
    """Whether `row` matches the condition `text`; an empty one matches all rows. Raises ConditionError.

    A column that the row does not have is null; so is a comparison of values of different types. Two texts that are
    times in ISO format, in UTC if they name no zone, are compared as times.
    """
    return not text or _holds(parse_condition(text), row) is True


def column_value(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, None if missing. Dots select struct fields, unless a column has the whole name."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def has_column(row: Mapping[str, Any], name: str) -> bool:
    """Whether `row` has the column, whose value may be null."""
    parent, _, last = name.rpartition(".")
    fields = column_value(row, parent) if parent else None
    return name in row or (isinstance(fields, Mapping) and last in fields)


def _holds(condition: Condition, row: Mapping[str, Any]) -> bool | None:
    """The value of `condition`, None for null."""
    if isinstance(condition, Comparison):
        return _compared(condition, column_value(row, condition.column))
    found = [_holds(part, row) for part in condition.parts]
    if condition.operator == "not":
        return None if found[0] is None else not found[0]
    decisive = condition.operator == "or"
    return decisive if decisive in found else (None if None in found else not decisive)


def _compared(comparison: Comparison, value: Any) -> bool | None:
    if comparison.operator in ("is null", "is not null"):
        return (value is None) == (comparison.operator == "is null")
    if value is None:
        return None
    alike = [each for each in comparison.values if _kind(each) is _kind(value)]
    if comparison.operator == "in":
        return any(operator.eq(*_as_times(value, each)) for each in alike)
    if not alike:
        return None
    if comparison.operator == "~":  # Arrow's engine, as for tables; its time is linear in the text
        return bool(pc.match_substring_regex(pa.scalar(value), alike[0]).as_py()) if isinstance(value, str) else None
    return _ORDER[comparison.operator](*_as_times(value, alike[0]))


def _kind(value: Value | Any) -> type:
    return float if isinstance(value, int | float) and not isinstance(value, bool) else type(value)


def _as_times(value: Any, other: Any) -> tuple[Any, Any]:
    """Both as times if both are texts of times; else unchanged."""
    if not all(isinstance(each, str) and _TIME.match(each) for each in (value, other)):
        return value, other
    try:
        times = [datetime.fromisoformat(each) for each in (value, other)]
    except ValueError:
        return value, other
    first, second = (each if each.tzinfo else each.replace(tzinfo=UTC) for each in times)
    return first, second
