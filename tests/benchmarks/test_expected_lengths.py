"""Expected response lengths of prompts: shrinkage, and the order that follows."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.expected_lengths import LengthPrior, expected_length, length_prior, longest_first

HALF = LengthPrior(math.log(100), within=1.0, between=1.0)


@pytest.mark.parametrize(
    ("lengths", "prior", "expected"),
    [
        ([], HALF, 100 * math.exp(1.0)),  # the lognormal mean of all
        ([100], HALF, 100 * math.exp(0.75)),
        ([400], HALF, 200 * math.exp(0.75)),  # half way from 100, in logarithms
        ([400, 400, 400], HALF, 100 * 4**0.75 * math.exp(0.625)),
        ([400] * 1000, HALF, 400 * math.exp(0.5)),
        ([400], LengthPrior(math.log(100), 1.0, 0.0), 100 * math.exp(0.5)),  # prompts do not differ
        ([400], LengthPrior(math.log(100), 0.0, 1.0), 400),  # a prompt's lengths do not differ
        ([], LengthPrior(0.0, 0.0, 0.0), 1.0),
    ],
)
def test_expected_length_is_shrunk_towards_all_prompts(lengths: list[int], prior: LengthPrior, expected: float) -> None:
    assert expected_length(lengths, prior) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_length_prior_finds_the_share_between_prompts(share: float) -> None:
    rng = np.random.default_rng(0)
    logs = 6 + rng.normal(0, share**0.5, (2000, 1)) + rng.normal(0, (1 - share) ** 0.5, (2000, 8))
    prior = length_prior(np.exp(logs[:, : 1 + i % 8][i]).tolist() for i in range(2000))
    assert prior.mean == pytest.approx(6, abs=0.1)
    assert prior.share == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([], (0.0, 0.0, 0.0)),
        ([[], []], (0.0, 0.0, 0.0)),
        ([[8]], (math.log(8), 0.0, 0.0)),
        ([[8, 8], []], (math.log(8), 0.0, 0.0)),
    ],
)
def test_length_prior_of_few_responses_has_no_variance(prompts: list[list[int]], expected: tuple[float, ...]) -> None:
    prior = length_prior(prompts)
    assert (prior.mean, prior.within, prior.between) == pytest.approx(expected)


def test_longest_first_keeps_the_order_of_equal_prompts() -> None:
    assert longest_first([[], [10], [], [1000], [10]], HALF) == [3, 0, 2, 1, 4]
    assert longest_first([[10], [1000]], LengthPrior(4.0, 1.0, 0.0)) == [0, 1]
