"""Conditions on the columns of a row: which rows of a table are drawn, and which of them are of a level."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from infra.name_lookup import suggest_name

_ENDS = ("least", "below")


def reach(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column; dots reach into structs, unless a column is named so as a whole. None: there is none."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def meets(row: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """Whether `row` meets the conditions `where`, by column (see PromptsConfig.where)."""
    return all(_fits(reach(row, column), wanted) for column, wanted in where.items())


def check_condition(column: str, wanted: Any) -> None:
    """Raise ValueError if `wanted` is no condition on `column`."""
    if not isinstance(wanted, Mapping):
        return
    for end, value in wanted.items():
        if end not in _ENDS:
            raise ValueError(f"{column}: a range has no {end!r}{suggest_name(end, _ENDS)}")
        if not _is_number(value):
            raise ValueError(f"{column}: {end} must be a number, not {value!r}")
    if not wanted or ("least" in wanted and "below" in wanted and not wanted["least"] < wanted["below"]):
        raise ValueError(f"{column}: nothing lies in the range {dict(wanted)}")


def _fits(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return _is_number(value) and bool(wanted.get("least", -math.inf) <= value < wanted.get("below", math.inf))
    return value in wanted if isinstance(wanted, list | tuple) else bool(value == wanted)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
