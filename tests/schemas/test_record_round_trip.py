"""Every record is restored from its encoding, alone and with others in one value."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_samples import PROMPT, SAMPLES
from record_strategies import records_of

from schemas import arrow
from schemas.arrow import decode_arrow, encode_arrow
from schemas.codec import (
    MAX_ROWS,
    MAX_VALUE_BYTES,
    RECORD_TYPES,
    RecordType,
    ValueTooLarge,
    decode,
    encode,
    encode_all,
    record_type,
)
from schemas.columns import token_ids
from schemas.plain import decode_json, encode_json, from_plain, to_plain
from schemas.records import RECORDS, PolicyVersion, Prompt, Trajectory
from schemas.scalars import checked_scalar

KINDS = pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@KINDS
@quick
@given(data=st.data())
def test_decode_restores_every_record_in_both_encodings(kind: type, data: st.DataObject) -> None:
    record = data.draw(records_of(kind))
    assert decode(*encode(record)) == [record]
    assert decode_arrow(kind, encode_arrow([record])) == [record]
    assert decode_json(kind, encode_json(record)) == record
    assert from_plain(kind, to_plain(record)) == record


@pytest.mark.parametrize("entry", [e for e in RECORD_TYPES if e.encoding == "arrow"], ids=lambda entry: entry.schema)
@quick
@given(data=st.data())
def test_decode_arrow_keeps_order_of_rows(entry: RecordType, data: st.DataObject) -> None:
    rows = data.draw(st.lists(records_of(entry.kind), min_size=1, max_size=5))
    assert decode_arrow(entry.kind, encode_arrow(rows)) == rows


@KINDS
def test_sample_names_its_schema_in_headers(kind: type) -> None:
    _, headers = encode(SAMPLES[kind])
    schema = record_type(kind).schema
    assert re.fullmatch(rf"{kind.__name__}/\d+", schema)
    assert ("laminar-schema", schema.encode()) in headers


def test_encode_rejects_rows_of_two_classes() -> None:
    first, second = list(SAMPLES.values())[:2]
    with pytest.raises(TypeError, match="cannot be in one record"):
        encode(first, second)


@pytest.mark.parametrize("text_bytes", [0, 1 << 16, 1 << 20])
def test_encode_all_uses_few_values_in_order(text_bytes: int) -> None:
    rows = [replace(PROMPT, number=number, text="x" * text_bytes) for number in range(MAX_ROWS + 3)]
    values = list(encode_all(rows)) if text_bytes < 1 << 20 else list(encode_all(rows[:20]))
    decoded = [row for value, headers in values for row in decode(value, headers)]
    assert decoded == rows[: len(decoded)]
    assert len(decoded) == (len(rows) if text_bytes < 1 << 20 else 20)
    assert len(values) <= 2 + 2 * len(decoded) * text_bytes // MAX_VALUE_BYTES


def test_encode_all_rejects_row_over_size_limit() -> None:
    with pytest.raises(ValueTooLarge):
        list(encode_all([PROMPT, replace(PROMPT, text="x" * MAX_VALUE_BYTES)]))


def members(*prompts: Prompt) -> list[Trajectory]:
    """A trajectory of each of `prompts`, every one with a copy of its own."""
    sample = SAMPLES[Trajectory]
    return [replace(sample, prompt=replace(each), member=at) for at, each in enumerate(prompts)]  # type: ignore[type-var]


OTHERS = [
    {"number": PROMPT.number + 1},
    {"reference": "{}"},
    {"token_ids": token_ids([1])},
    {"messages": ()},
    {"policy_version": None if PROMPT.policy_version else PolicyVersion(1, 2)},
    {"sampling": replace(PROMPT.sampling, temperature=0.25)},
]


@pytest.mark.parametrize("changed", OTHERS, ids=lambda changed: next(iter(changed)))
def test_decoded_members_of_a_group_share_a_prompt(changed: dict[str, Any]) -> None:
    rows = members(PROMPT, other := replace(PROMPT, **changed), PROMPT, other)
    decoded = decode_arrow(Trajectory, encode_arrow(rows))
    assert decoded == rows
    one, another, *more = [row.prompt for row in decoded]
    assert more[0] is one
    assert another is not one
    assert (more[1] is another) is (other.number != PROMPT.number)  # compared with the first of its number alone


def test_shared_prompt_is_flattened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = members(*[PROMPT] * 8)
    expected, checked = encode_arrow(rows), Counter[str]()

    def check(name: str, of: type, value: object) -> object:
        checked[name] += 1
        return checked_scalar(name, of, value)

    monkeypatch.setattr(arrow, "checked_scalar", check)
    assert encode_arrow([replace(row, prompt=PROMPT) for row in rows]) == expected
    assert (checked["prompt.sampling.temperature"], checked["finish_reason"]) == (1, 8)
