"""Drops by response length: which tenth of all that has ended lost how much."""

from __future__ import annotations

import pytest

from operators.experience.measures import by_decile, coarse


@pytest.mark.parametrize(
    ("ended", "dropped", "shares"),
    [
        ({10 * n: 8 for n in range(1, 11)}, {10: 2, 100: 6}, [0.25, 0, 0, 0, 0, 0, 0, 0, 0, 0.75]),
        ({900: 5, 10: 5}, {900: 5}, [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]),
        ({1: 3, 2: 1}, {2: 1}, [0, 0, 0, 0, 0, 0, 0, 0.5, 1, 1]),  # a tenth is less than one answer
    ],
)
def test_shares_are_of_the_shortest_tenth_first(
    ended: dict[int, int], dropped: dict[int, int], shares: list[float]
) -> None:
    found = by_decile(ended, dropped)
    assert list(found) == [f"dropped_share/{decile}" for decile in range(1, 11)]
    assert list(found.values()) == pytest.approx(shares)


@pytest.mark.parametrize(("tokens", "told"), [(0, 0), (127, 127), (128, 128), (129, 128), (1001, 1000), (1007, 1000)])
def test_long_lengths_are_told_coarsely(tokens: int, told: int) -> None:
    assert coarse(tokens) == told
