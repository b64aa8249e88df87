"""Conditions: one grammar, with the same result on Arrow tables and on mappings."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.conditions.grammar import ConditionError, comparisons, parse_condition
from infra.conditions.rows import row_matches
from infra.conditions.tables import table_condition

ROWS = [
    {"n": 0, "reward": 1.0, "task": "sums", "ok": True, "a.b": 1, "two words": "x"},
    {"n": 1, "reward": 0.25, "task": "gcd", "ok": False, "a.b": 2, "two words": "y"},
    {"n": 2, "reward": 0.5, "task": "it's", "ok": None, "a.b": None, "two words": None},
    {"n": 3, "reward": None, "task": None, "ok": True, "a.b": 3, "two words": r"\d"},
]
TABLE = pa.Table.from_pylist(ROWS)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("reward > 0.25", [0, 2]),
        ("reward = 1 or reward == 0.25", [0, 1]),
        ("reward >= .5e0", None),
        ("not (reward >= 0.5)", [1]),
        ("not reward >= 5e-1", [1]),
        ("not not ok", [0, 3]),
        ("ok", [0, 3]),
        ("ok = false or n = 2", [1, 2]),
        ("reward < 1 and n = 1 or reward = 1", [0, 1]),
        ("reward < 1 and (n = 1 or reward = 1)", [1]),
        ("task in ('sums', 'gcd')", [0, 1]),
        ("not task in ('sums')", [1, 2]),
        ("n in (0, 3.0)", [0, 3]),
        ("task ~ '^[gs]' and n != 0", [1]),
        ("not task ~ 's'", [1]),
        ("task = 'it\\'s' or task = \"gcd\"", [1, 2]),
        ("reward is null", [3]),
        ("reward is not null and not reward != 0.5", [2]),
        ("reward != 0.5", [0, 1]),
        ("ok or reward = 0.5", [0, 2, 3]),
        ("ok and reward > 0", [0]),
        ("a.b >= 2", [1, 3]),
        ("`two words` = 'x' or `two words` ~ '^.d'", [0, 3]),
        ("`two words` = '\\d'", [3]),
        ("n > -1 and n < 1", [0]),
    ],
)
def test_condition_selects_the_same_rows_of_tables_and_mappings(text: str, rows: list[int] | None) -> None:
    if rows is None:
        with pytest.raises(ConditionError):
            parse_condition(text)
        return
    assert table_condition(text, TABLE.schema).rows(TABLE)["n"].to_pylist() == rows
    assert [row["n"] for row in ROWS if row_matches(row, text)] == rows


PART = st.sampled_from(["n < 2", "reward > 0.3", "ok", "task in ('gcd')", "task is null", "a.b != 2", "task ~ 'g'"])
COMBINED = st.recursive(
    PART,
    lambda inner: st.one_of(
        inner.map(lambda part: f"not ({part})"),
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda parts: f"({' '.join(parts)})"),
    ),
)


@given(COMBINED)
def test_both_evaluations_agree_on_any_combination(text: str) -> None:
    selected = table_condition(text, TABLE.schema).rows(TABLE)["n"].to_pylist()
    assert [row["n"] for row in ROWS if row_matches(row, text)] == selected


@pytest.mark.parametrize(
    ("text", "at", "reason"),
    [
        ("", "the end", "it is empty"),
        ("  ", "the end", "it is empty"),
        ("reward > 1 reward", "reward", "`and` or `or` to combine conditions"),
        ("(reward > 1", "the end", "expected ')'"),
        ("reward > 1 and", "the end", "expected a comparison"),
        ("reward > 1; drop", "; drop", "to combine conditions"),
        ("reward >", "the end", "expected a number, a 'text', true or false"),
        ("n in ()", ")", "expected a number"),
        ("task is", "the end", "expected `null` or `not null`"),
        ("and = 1", "and = 1", "expected a comparison"),
        ("task = 'open", "'open", "expected a number, a 'text'"),
        ("(" * 999 + "n > 1" + ")" * 999, "(" * 20, "too many parentheses"),
    ],
)
def test_invalid_grammar_raises_with_position_and_reason(text: str, at: str, reason: str) -> None:
    with pytest.raises(ConditionError) as raised:
        parse_condition(text)
    assert f"at {at!r}: " in str(raised.value)
    assert reason in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rewrad > 1", "at 'rewrad > 1': there is no column rewrad; the nearest is reward"),
        ("n = 1 and rewrad is null", "at 'rewrad is null': there is no column"),
        ("__import__('os')", "`and` or `or` to combine"),
        ("reward > 'much'", "reward must be compared with a value of type double, not 'much'"),
        ("n > 0.5", "n must be compared with a value of type int64"),
        ("n > 99999999999999999999", "n must be compared with a value of type int64"),
        ("ok = 1", "ok must be compared with a value of type bool"),
        ("reward", "reward must be compared with a value of type double, not True"),
        ("mask = 1", "only `is null` and `is not null` are allowed"),
        ("at > 'soon'", "a time such as"),
        ("task ~ '('", "not a regular expression"),
        ("reward ~ 1", "reward is not a text column"),
    ],
)
def test_condition_that_does_not_fit_a_table_raises(text: str, reason: str) -> None:
    schema = TABLE.schema.append(pa.field("mask", pa.list_(pa.int64()))).append(pa.field("at", pa.timestamp("ms")))
    with pytest.raises(ConditionError) as raised:
        table_condition(text, schema)
    assert reason in str(raised.value)


def test_table_condition_compares_times_in_utc() -> None:
    times = [datetime(1970, 1, 1, hour, tzinfo=UTC) for hour in (1, 2)]
    table = pa.table({"at": pa.array(times, pa.timestamp("ms", "UTC"))})
    assert len(table_condition("at >= '1970-01-01T02:00'", table.schema).rows(table)) == 1
    assert len(table_condition("at >= '1970-01-01T02:00+01:00'", table.schema).rows(table)) == 2


def test_table_condition_names_its_columns() -> None:
    assert table_condition("n = 1 and (ok or n < 2)", TABLE.schema).columns == {"n", "ok"}
    assert [each.column for each in comparisons(parse_condition("n = 1 and (ok or n < 2)"))] == ["n", "ok", "n"]


@pytest.mark.parametrize(
    ("row", "text", "matches"),
    [
        ({"n": "1"}, "n = 1", False),  # another type: null
        ({"n": "1"}, "not n = 1", False),
        ({"n": True}, "n = 1", False),
        ({"n": 1}, "n = 1.0", True),
        ({"meta": {"rate": 0.5}}, "meta.rate < 1", True),
        ({"meta": {"rate": 0.5}, "meta.rate": 2}, "meta.rate < 1", False),
        ({"meta": 3}, "meta.rate is null", True),
        ({"n": [1]}, "n = 1 or n ~ 'x'", False),
        ({"at": "1970-01-01T01:00:00+01:00"}, "at = '1970-01-01' and at in ('1970-01-01T00:00')", True),
        ({"at": "1970-01-01T02:00:00"}, "at > '1970-01-01T02:00+01:00' and at <= '1970-01-01T02:00'", True),
        ({"at": "1970-01-99"}, "at > '1970-01-02'", True),  # a text
        ({}, "", True),
    ],
)
def test_row_matches_by_type_and_by_struct_field(row: dict, text: str, matches: bool) -> None:
    assert row_matches(row, text) is matches


def test_long_conjunction_is_evaluated() -> None:
    text = " and ".join(["n >= 0"] * 5000)
    assert len(table_condition(text, TABLE.schema).rows(TABLE)) == len(ROWS)
    assert row_matches(ROWS[0], text)
