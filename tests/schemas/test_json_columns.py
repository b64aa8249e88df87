"""`plain_rows` gives the same rows as `to_plain` of the records."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_strategies import records_of

from schemas.block import Block
from schemas.plain import plain_rows, to_plain
from schemas.records import RECORDS


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_plain_rows_match_to_plain(kind: type, data: st.DataObject) -> None:
    records = data.draw(st.lists(records_of(kind), min_size=1, max_size=3))
    expected = [to_plain(record) for record in records]
    assert plain_rows(Block.of(records)) == expected
    assert json.dumps(plain_rows(Block.of(records))) == json.dumps(expected)
