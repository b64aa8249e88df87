"""Checks of the values of Arrow columns, without building records."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import isfinite

import pyarrow as pa
import pyarrow.compute as pc

FEW_VALUES = 64
"""Up to so many values are checked in Python."""


@dataclass(frozen=True, slots=True)
class ColumnCheck:
    """The checks of a column. A `required` column has no null, `choices` are all values that it may have, and `numbers`
    are finite. `parts` are the checks of a list's elements (one) or of a struct's fields.
    """

    name: str
    required: bool
    choices: tuple[str, ...] | None = None
    numbers: bool = False
    is_list: bool = False
    parts: tuple[ColumnCheck, ...] = ()


def column_check(field: pa.Field, choices: Collection[str] | None = None, name: str = "") -> ColumnCheck:
    """The check of column `field`, whose values are `choices` (None: any)."""
    name, kind = name or field.name, field.type
    known = None if choices is None else tuple(sorted(choices))
    parts: list[ColumnCheck] = []
    if pa.types.is_list(kind):
        parts = [column_check(kind.value_field, name=name)]
    elif pa.types.is_struct(kind):
        parts = [column_check(part, name=f"{name}.{part.name}") for part in kind]
    numbers, is_list = pa.types.is_float64(kind), pa.types.is_list(kind)
    if is_list and parts == [ColumnCheck(name, required=False)]:
        parts = []  # any value is valid
    return ColumnCheck(name, not field.nullable, known, numbers, is_list, tuple(parts))


def check_column(check: ColumnCheck, column: pa.Array) -> None:
    """Raise ValueError for a null in a required column, a number that is not finite, or a value beside the choices."""
    if check.required and column.null_count:
        raise ValueError(f"{check.name} is null or contains a null")
    if check.numbers:
        if not _are_finite(column):
            raise ValueError(f"{check.name}: a number is not finite")
    elif check.is_list:
        for part in check.parts:
            check_column(part, column.flatten())
    elif check.parts:
        for part, values in zip(check.parts, column.flatten(), strict=True):
            check_column(part, values)
    if check.choices is not None and not _are_among(column, check.choices):
        raise ValueError(f"{check.name}: a value is not one of {list(check.choices)}")


def _are_finite(column: pa.Array) -> bool:
    if len(column) <= FEW_VALUES:
        return all([value is None or isfinite(value) for value in column.to_pylist()])  # noqa: C419 - faster
    return bool(pc.all(pc.is_finite(column), min_count=0).as_py())


def _are_among(column: pa.Array, choices: tuple[str, ...]) -> bool:
    if len(column) <= FEW_VALUES:
        return all([value is None or value in choices for value in column.to_pylist()])  # noqa: C419 - faster
    return bool(pc.all(pc.is_in(column.drop_null(), pa.array(choices)), min_count=0).as_py())
