"""Where a text ends, told token by token; what engines make of it is in test_engine_stops.py."""

from __future__ import annotations

import numpy as np
import pytest

from operators.rollout.stop_strings import Stops


def decode(token_ids: list[int]) -> str:
    return bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("strings", "text", "end"),
    [
        ((), "abc", None),
        (("</c>",), "<c>1</c", None),
        (("</c>",), "<c>1</c>", 8),
        (("</c>",), "</c></c>", 4),
        (("x", "b"), "abx", 2),
        (("é",), "caé!", 4),
    ],
)
def test_a_turn_ends_with_the_token_that_completes_a_stop_string(
    strings: tuple[str, ...], text: str, end: int | None
) -> None:
    stops, token_ids = Stops(strings, decode), np.frombuffer(text.encode(), np.uint8)
    assert stops.end(token_ids) == end
    if end is not None:
        assert stops.may_end(token_ids[end - 1 : end])
        assert not stops.may_end(token_ids[:1]) or end == 1
