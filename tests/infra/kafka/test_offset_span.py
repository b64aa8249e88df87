"""Offsets as users of kcat and rpk write them."""

from __future__ import annotations

import pytest

from infra.kafka.offset_span import parse_span

NOW = 1_800_000_000_000
TIMES = {1_700_000_000_000: 30, NOW - 3_600_000: 60, 1_769_860_800_000: 40}


@pytest.mark.parametrize(
    ("texts", "span"),
    [
        (["beginning"], (10, 100)),
        (["start"], (10, 100)),
        (["end"], (100, 100)),
        (["42"], (42, 100)),
        (["3"], (10, 100)),
        (["-5"], (95, 100)),
        (["+5"], (15, 100)),
        (["20:30"], (20, 30)),
        (["+1:+3"], (11, 13)),
        ([":end"], (10, 100)),
        (["20:"], (20, 100)),
        ([":-10"], (10, 90)),
        (["s@1700000000000"], (30, 100)),
        (["e@1700000000000"], (10, 30)),
        (["s@1700000000000", "e@2026-01-31T12:00"], (30, 40)),
        (["@1700000000000"], (30, 100)),
        (["@-1h"], (60, 100)),
        (["@1700000000000:-1h"], (30, 60)),
        (["@2026-01-31T12:00:end"], (40, 100)),
        (["@2026-01-31T12:00:-1h"], (40, 60)),
        (["@:1700000000000"], (10, 30)),
        ([], (10, 100)),
    ],
)
def test_parse_span_notations(texts: list[str], span: tuple[int, int]) -> None:
    read = parse_span(texts, NOW)
    found = [None if e is None else e.within(10, 100, TIMES.get(e.number)) for e in (read.first, read.last)]
    assert (found[0], 100 if found[1] is None else found[1]) == span


@pytest.mark.parametrize(
    "texts", [["then"], [":"], ["1:2:3"], ["@"], ["@soon"], ["--1"], ["s@1h", "2"], [""], ["1.5"], ["9" * 30]]
)
def test_parse_span_rejects_invalid_text(texts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"is not an offset|is not a time|given twice"):
        parse_span(texts, NOW)
