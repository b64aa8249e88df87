"""The metrics of dropped trajectories by response length."""

from __future__ import annotations

import pytest

from operators.experience.buffer_metrics import dropped_share_by_decile, round_length


@pytest.mark.parametrize(
    ("settled", "dropped", "shares"),
    [
        ({10 * n: 8 for n in range(1, 11)}, {10: 2, 100: 6}, [0.25, 0, 0, 0, 0, 0, 0, 0, 0, 0.75]),
        ({900: 5, 10: 5}, {900: 5}, [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]),
        ({1: 3, 2: 1}, {2: 1}, [0, 0, 0, 0, 0, 0, 0, 0.5, 1, 1]),  # a decile is less than one answer
    ],
)
def test_dropped_share_by_decile_starts_with_the_shortest(
    settled: dict[int, int], dropped: dict[int, int], shares: list[float]
) -> None:
    found = dropped_share_by_decile(settled, dropped)
    assert list(found) == [f"dropped_share/{decile}" for decile in range(1, 11)]
    assert list(found.values()) == pytest.approx(shares)


@pytest.mark.parametrize(("tokens", "told"), [(0, 0), (127, 127), (128, 128), (129, 128), (1001, 1000), (1007, 1000)])
def test_round_length_keeps_seven_significant_bits(tokens: int, told: int) -> None:
    assert round_length(tokens) == told
