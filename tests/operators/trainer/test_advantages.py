"""Advantages compared with loops over single sequences that follow the formulas."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch

from operators.trainer import advantages
from operators.trainer.advantages import Rewards
from operators.trainer.config import AlgorithmConfig

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 0.0, 2.0]
GROUPS = [0, 0, 1, 0, 1, 1, 2]
LENGTHS = [2, 1, 3, 0, 1, 2, 2]
CONFIG = AlgorithmConfig(std_epsilon=1e-4)


def group_of(index: int) -> list[float]:
    return [reward for reward, group in zip(REWARDS, GROUPS, strict=True) if group == GROUPS[index]]


def grpo(index: int) -> float:
    group = group_of(index)
    if len(group) == 1:
        return 0.0
    return (REWARDS[index] - statistics.mean(group)) / (statistics.stdev(group) + 1e-4)


def dr_grpo(index: int) -> float:
    return REWARDS[index] - statistics.mean(group_of(index))


def rloo(index: int) -> float:
    group = group_of(index)
    if len(group) == 1:
        return 0.0
    others = (sum(group) - REWARDS[index]) / (len(group) - 1)
    return REWARDS[index] - others


@pytest.mark.parametrize(
    ("estimator", "of_sequence"),
    [
        (advantages.group_normalised, grpo),
        (advantages.group_centred, dr_grpo),
        (advantages.leave_one_out, rloo),
    ],
)
def test_group_estimators_match_their_formula(
    estimator: advantages.Estimator, of_sequence: Callable[[int], float]
) -> None:
    expected = [of_sequence(i) for i, length in enumerate(LENGTHS) for _ in range(length)]
    assert estimate(estimator, CONFIG) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("baseline", [False, True])
def test_whitened_returns_match_their_formula(discount: float, baseline: bool) -> None:
    returns = []
    for index, length in enumerate(LENGTHS):
        reward = dr_grpo(index) if baseline else REWARDS[index]
        returns += [reward * discount ** (length - 1 - token) for token in range(length)]
    mean, variance = statistics.mean(returns), statistics.variance(returns)
    expected = [(value - mean) / math.sqrt(variance + 1e-8) for value in returns]
    estimator = advantages.group_centred_whitened if baseline else advantages.whitened_returns
    assert estimate(estimator, AlgorithmConfig(discount=discount)) == pytest.approx(expected, abs=1e-12)


def test_group_estimators_return_zero_for_equal_rewards() -> None:
    """Rows are skipped if the advantage equals 0, so no rounding error may remain, e.g. for rewards of 0.1."""
    for reward in (0.1, 1.0, -3.7, 1e6):
        for size in (2, 3, 7, 8):
            rewards = torch.full((size,), reward, dtype=torch.float64)
            ones = torch.ones(size, dtype=torch.int64)
            for config in (CONFIG, AlgorithmConfig(std_epsilon=0.0)):
                found = advantages.group_normalised(Rewards(rewards, 0 * ones, ones), config)
                assert found.abs().max() == 0, (reward, size, config)


@pytest.mark.parametrize("tokens", [0, 1])
def test_whiten_returns_zero_for_fewer_than_two_tokens(tokens: int) -> None:
    zeros = torch.zeros(1, dtype=torch.int64)
    found = advantages.whitened_returns(Rewards(torch.ones(1).double(), zeros, torch.tensor([tokens])), CONFIG)
    assert found.tolist() == [0.0] * tokens


def test_whiten_divides_two_values_by_their_deviation() -> None:
    assert advantages.whiten(torch.tensor([1.0, 3.0]).double()).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


VALUES = [0.5, -0.2, 0.1, 0.9, -0.4, 0.3, 0.0, 0.2, -0.1, 0.6, 0.4]
PENALTIES = [0.1, -0.2, 0.3, 0.0, 0.05, 0.2, 0.1, -0.1, 0.0, 0.2, 0.3]


@pytest.mark.parametrize("penalties", [None, PENALTIES])
@pytest.mark.parametrize(("discount", "trace"), [(1.0, 1.0), (0.9, 0.8), (0.9, 0.0)])
def test_temporal_differences_match_their_formula(penalties: list[float] | None, discount: float, trace: float) -> None:
    expected, start = [], 0
    for index, length in enumerate(LENGTHS):
        after_value = after = 0.0
        own: list[float] = []
        for token in reversed(range(start, start + length)):
            reward = REWARDS[index] if token == start + length - 1 else 0.0
            reward -= penalties[token] if penalties else 0.0
            after = reward + discount * after_value - VALUES[token] + discount * trace * after
            after_value = VALUES[token]
            own.insert(0, after)
        expected += own
        start += length
    given = Rewards(
        torch.tensor(REWARDS, dtype=torch.float64),
        torch.tensor(GROUPS),
        torch.tensor(LENGTHS),
        None if penalties is None else torch.tensor(penalties, dtype=torch.float64),
        torch.tensor(VALUES, dtype=torch.float64),
    )
    config = AlgorithmConfig(discount=discount, gae_lambda=trace)
    assert advantages.temporal_differences(given, config).tolist() == pytest.approx(expected, abs=1e-12)
    targets = [advantage + value for advantage, value in zip(expected, VALUES, strict=True)]
    assert advantages.value_targets(given, config).tolist() == pytest.approx(targets, abs=1e-12)


def test_penalties_are_subtracted_from_their_sequence() -> None:
    given = Rewards(
        torch.tensor(REWARDS, dtype=torch.float64),
        torch.tensor(GROUPS),
        torch.tensor(LENGTHS),
        torch.tensor(PENALTIES, dtype=torch.float64),
    )
    starts = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
    own = [sum(PENALTIES[start : start + length]) for start, length in zip(starts, LENGTHS, strict=True)]
    expected = [reward - penalty for reward, penalty in zip(REWARDS, own, strict=True)]
    assert given.totals().tolist() == pytest.approx(expected, abs=1e-12)


def estimate(estimator: advantages.Estimator, config: AlgorithmConfig) -> list[float]:
    tensors = torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(GROUPS), torch.tensor(LENGTHS)
    return estimator(Rewards(*tensors), config).tolist()


ROOT_HALF = math.sqrt(0.375)  # of 1, 0 (weight 1/2 each) and 0: mean 0.25


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (advantages.group_centred, [0.75, 0.75, -0.25, -0.25]),
        (advantages.group_normalised, [0.75 / ROOT_HALF, 0.75 / ROOT_HALF, -0.25 / ROOT_HALF, -0.25 / ROOT_HALF]),
        (advantages.leave_one_out, [1.0, 1.0, 0.0, -0.5]),
        (lambda rewards, config: advantages._returns(rewards.per_token(), rewards.lengths, 0.5), [0.5, 1.0, 0.0, 0.0]),
    ],
)
def test_conversations_have_advantages_of_their_own(estimator: advantages.Estimator, expected: list[float]) -> None:
    """Two sequences of a group: one of two conversations with rewards 1 and 0, and one with reward 0."""
    outcomes, groups = torch.tensor([1.0, 0.0, 0.0]).double(), torch.zeros(3, dtype=torch.int64)
    rewards = Rewards(outcomes, groups, torch.tensor([2, 1, 1]), sequences=torch.tensor([0, 0, 1]))
    assert estimator(rewards, AlgorithmConfig(std_epsilon=0.0)).tolist() == pytest.approx(expected)


def test_conversations_with_equal_rewards_have_advantage_0() -> None:
    outcomes, groups = torch.full((4,), 0.3).double(), torch.zeros(4, dtype=torch.int64)
    rewards = Rewards(outcomes, groups, torch.ones(4, dtype=torch.int64), sequences=torch.tensor([0, 0, 0, 1]))
    for estimator in (advantages.group_centred, advantages.group_normalised, advantages.leave_one_out):
        assert estimator(rewards, CONFIG).tolist() == [0.0] * 4


def test_sequences_of_one_context_have_no_weights() -> None:
    one = torch.ones(3, dtype=torch.int64)
    for sequences in (None, torch.tensor([0, 1, 2])):
        assert Rewards(one.double(), 0 * one, one, sequences=sequences).weights() is None
