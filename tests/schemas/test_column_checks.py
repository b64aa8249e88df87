"""Columns of few and of many values are checked alike, though one way is a Python loop and the other Arrow's."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from schemas.column_checks import FEW_VALUES, check_column, column_check

NUMBERS = pa.list_(pa.field("item", pa.float64(), nullable=False))
PARTS = pa.struct([pa.field("name", pa.string(), nullable=False), pa.field("mean", pa.float64())])


@pytest.mark.parametrize("others", [0, FEW_VALUES])
@pytest.mark.parametrize(
    ("field", "valid", "invalid", "reason"),
    [
        (pa.field("n", pa.int64(), nullable=False), 1, None, "n is null"),
        (pa.field("x", pa.float64()), 0.5, float("nan"), "x: a number is not finite"),
        (pa.field("x", pa.float64()), None, float("inf"), "x: a number is not finite"),
        (pa.field("xs", NUMBERS), [0.5], [0.5, float("-inf")], "xs: a number is not finite"),
        (pa.field("xs", NUMBERS), None, [None], "xs is null or contains a null"),
        (pa.field("part", PARTS), {"name": "a", "mean": None}, {"name": None, "mean": 0.5}, "part.name is null"),
        (pa.field("parts", pa.list_(PARTS)), [], [{"name": "a", "mean": float("nan")}], "parts.mean: a number is not"),
        (pa.field("state", pa.string()), "idle", "asleep", r"state: a value is not one of \['busy', 'idle'\]"),
        (pa.field("state", pa.string()), None, "", "state: a value is not one of"),
    ],
)
def test_check_column_rejects_what_a_record_does_not_permit(
    field: pa.Field, valid: Any, invalid: Any, reason: str, others: int
) -> None:
    check = column_check(field, {"idle", "busy"} if field.name == "state" else None)
    check_column(check, pa.array([valid] * (1 + others), field.type))
    check_column(check, pa.array([], field.type))
    with pytest.raises(ValueError, match=reason):
        check_column(check, pa.array([valid] * others + [invalid], field.type))


def test_check_column_reads_only_the_rows_of_a_slice() -> None:
    column = pa.array([[1.0], [float("nan")]], pa.list_(pa.float64()))
    check = column_check(pa.field("xs", column.type))
    check_column(check, column.slice(0, 1))
    with pytest.raises(ValueError, match="not finite"):
        check_column(check, column.slice(1))
