"""Turns and observations derived from a loss mask."""

from __future__ import annotations

import numpy as np
import pytest

from operators.rollout.engine import PartialResponse
from operators.rollout.turns import append_observation, last_turn, observation_ranges, turn_ranges, with_loss_mask


@pytest.mark.parametrize(
    ("mask", "turns", "observations"),
    [
        ([], [], []),
        ([0, 0], [], []),
        ([1, 1], [(0, 2)], [(0, 0)]),
        ([0, 1, 1, 0, 1], [(1, 3), (4, 5)], [(0, 1), (3, 4)]),
        ([1, 0, 0], [(0, 1)], [(0, 0)]),
    ],
)
def test_turn_ranges_are_runs_of_drawn_tokens(
    mask: list[int], turns: list[tuple[int, int]], observations: list[tuple[int, int]]
) -> None:
    drawn = np.array(mask, bool)
    assert turn_ranges(drawn) == [range(*turn) for turn in turns]
    assert observation_ranges(drawn) == [range(*each) for each in observations]
    assert last_turn(drawn) == (range(*turns[-1]) if mask and mask[-1] else None)


def partial(*token_ids: int) -> PartialResponse:
    return PartialResponse(np.array(token_ids, np.int32), np.full(len(token_ids), -0.5, np.float32))


def test_append_observation_masks_its_tokens() -> None:
    known = append_observation(partial(1, 2), [7, 8])
    assert (known.token_ids.tolist(), known.logprobs.tolist()) == ([1, 2, 7, 8], [-0.5, -0.5, 0.0, 0.0])
    whole = partial(1, 2, 7, 8, 3)
    assert with_loss_mask(whole, known).drawn.tolist() == [True, True, False, False, True]
    for start in range(6):
        assert (
            with_loss_mask(whole.since(start), known, start).drawn.tolist() == [True, True, False, False, True][start:]
        )
