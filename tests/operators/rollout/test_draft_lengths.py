"""The draft length that pays most."""

from __future__ import annotations

import numpy as np
import pytest

from operators.rollout.draft_lengths import ForwardCost, draft_length, expected_tokens

FLAT = ForwardCost(np.array([1, 256]), np.array([1.0, 1.0]), np.array([1.0, 1.0]))
"""A pass takes as long for any number of tokens."""
LINEAR = ForwardCost(np.array([1, 256]), np.array([1.0, 256.0]), np.array([1.0, 256.0]))
"""A pass takes a second a token."""
KNEE = ForwardCost(np.array([1, 16, 256]), np.array([1.0, 1.0, 16.0]), np.array([1.0, 1.0, 16.0]))


@pytest.mark.parametrize(
    ("cost", "lengths", "acceptance", "expected"),
    [
        (FLAT, [16], [0.9], 16),
        (FLAT, [5], [0.9], 5),
        (FLAT, [0, 0], [0.9, 0.9], 0),
        (FLAT, [16], [0.0], 0),
        (LINEAR, [16], [0.99], 0),
        (KNEE, [16], [0.9], 16),
        (KNEE, [16] * 4, [0.9] * 4, 3),
        (KNEE, [16] * 16, [0.9] * 16, 0),
        (KNEE, [16, 0, 0, 0], [0.9, 0.0, 0.0, 0.0], 3),
    ],
)
def test_draft_length_has_the_most_tokens_per_second(
    cost: ForwardCost, lengths: list[int], acceptance: list[float], expected: int
) -> None:
    assert draft_length(np.array(lengths), np.array(acceptance), cost) == expected


def test_expected_tokens_are_those_of_accepted_drafts() -> None:
    drawn = np.random.default_rng(0).random((200_000, 6)) < 0.7
    accepted = np.cumprod(drawn, 1).sum(1)
    assert abs(float(expected_tokens(np.array(0.7), np.array(6))) - (accepted + 1).mean()) < 0.01


def test_cost_beyond_the_largest_pass_is_linear() -> None:
    assert KNEE.verify(np.array([8, 256, 512])).tolist() == [1.0, 16.0, 32.0]
