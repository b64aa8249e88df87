"""Conditions on Arrow tables. Names and values are checked against the schema before the first row is read."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial, reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from infra.conditions.grammar import Comparison, Condition, ConditionError, Value, comparisons, parse_condition

Mask = Callable[[pa.Table], Any]

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


@dataclass(frozen=True)
class TableCondition:
    """A condition on the rows of tables of one schema; `mask` gives a boolean or null for each row."""

    columns: frozenset[str]
    mask: Mask

    def rows(self, table: pa.Table) -> pa.Table:
        """The rows of `table` for which the condition is true."""
        return table.filter(self.mask(table), null_selection_behavior="drop")


def table_condition(text: str, schema: pa.Schema) -> TableCondition:
    """The condition `text` on rows of `schema`. A time is compared with a text such as '2026-01-31T12:00'.

    Raises ConditionError, also for a column or value that does not fit `schema`.
    """
    condition = parse_condition(text)
    for comparison in comparisons(condition):
        _check_column(text, comparison, schema)
    columns = frozenset(comparison.column for comparison in comparisons(condition))
    return TableCondition(columns, _mask(text, condition, schema))


def _mask(text: str, condition: Condition, schema: pa.Schema) -> Mask:
    if isinstance(condition, Comparison):
        return _comparison_mask(text, condition, schema.field(condition.column).type)
    parts = [_mask(text, part, schema) for part in condition.parts]
    if condition.operator == "not":
        return lambda table: pc.invert(parts[0](table))
    combine = pc.and_kleene if condition.operator == "and" else pc.or_kleene
    return lambda table: reduce(combine, (part(table) for part in parts))


def _comparison_mask(text: str, comparison: Comparison, kind: pa.DataType) -> Mask:
    column, operator = comparison.column, comparison.operator
    if operator in ("is null", "is not null"):
        test = pc.is_null if operator == "is null" else pc.is_valid
        return lambda table: test(table[column])
    fail = partial(ConditionError, text, comparison.at)
    if pa.types.is_nested(kind):
        raise fail(f"{column} is a list, for which only `is null` and `is not null` are allowed")
    try:
        values = pa.array([_typed(value, kind) for value in comparison.values], kind)
    except ValueError:
        wanted = "a time such as '2026-01-31T12:00'" if pa.types.is_timestamp(kind) else f"a value of type {kind}"
        raise fail(f"{column} must be compared with {wanted}, not {comparison.values[0]!r}") from None
    if operator == "in":
        return lambda table: _is_in(table[column], values)
    if operator != "~":
        return lambda table: _COMPARE[operator](table[column], values[0])
    if not pa.types.is_string(kind):
        raise fail(f"{column} is not a text column")
    pattern = values[0].as_py()
    try:
        pc.match_substring_regex(pa.array([""]), pattern)
    except pa.ArrowInvalid as error:
        raise fail(f"not a regular expression: {error}") from None
    return lambda table: pc.match_substring_regex(table[column], pattern)


def _is_in(column: pa.ChunkedArray, values: pa.Array) -> Any:
    """Arrow's `is_in` is false for null, where the condition is null."""
    return pc.if_else(pc.is_valid(column), pc.is_in(column, value_set=values), pa.scalar(None, pa.bool_()))


def _check_column(text: str, comparison: Comparison, schema: pa.Schema) -> None:
    if comparison.column not in schema.names:
        close = difflib.get_close_matches(comparison.column, schema.names, n=1, cutoff=0.5)
        near = f"the nearest is {close[0]}" if close else f"there are {', '.join(schema.names)}"
        raise ConditionError(text, comparison.at, f"there is no column {comparison.column}; {near}")


def _typed(value: Value, kind: pa.DataType) -> Any:
    """`value` for a column of type `kind`. Raises ValueError if it has another type."""
    if isinstance(value, bool):
        if pa.types.is_boolean(kind):
            return value
    elif isinstance(value, str):
        if pa.types.is_timestamp(kind):
            time = datetime.fromisoformat(value)
            return time if time.tzinfo else time.replace(tzinfo=UTC)
        if pa.types.is_string(kind):
            return value
    elif pa.types.is_floating(kind):
        return float(value)
    elif pa.types.is_integer(kind) and float(value).is_integer() and abs(value) < 2**62:
        return int(value)
    raise ValueError(value)
