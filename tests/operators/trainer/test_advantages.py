"""Advantages as tables of numbers, against loops that follow the formulas one sequence at a time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch

from operators.trainer import advantages
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
def test_group_estimators_follow_their_formula(
    estimator: advantages.Estimator, of_sequence: Callable[[int], float]
) -> None:
    expected = [of_sequence(i) for i, length in enumerate(LENGTHS) for _ in range(length)]
    assert estimate(estimator, CONFIG) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("baseline", [False, True])
def test_whitened_returns_follow_their_formula(discount: float, baseline: bool) -> None:
    returns = []
    for index, length in enumerate(LENGTHS):
        reward = dr_grpo(index) if baseline else REWARDS[index]
        returns += [reward * discount ** (length - 1 - token) for token in range(length)]
    mean, variance = statistics.mean(returns), statistics.variance(returns)
    expected = [(value - mean) / math.sqrt(variance + 1e-8) for value in returns]
    estimator = advantages.group_centred_whitened if baseline else advantages.whitened_returns
    assert estimate(estimator, AlgorithmConfig(discount=discount)) == pytest.approx(expected, abs=1e-12)


def test_a_group_of_equal_rewards_gives_exactly_nothing() -> None:
    """Rows are skipped by comparing with 0, so no rounding error may remain, of rewards like 0.1 least of all."""
    for reward in (0.1, 1.0, -3.7, 1e6):
        for size in (2, 3, 7, 8):
            rewards = torch.full((size,), reward, dtype=torch.float64)
            found = advantages.group_normalised(
                rewards, torch.zeros(size, dtype=torch.int64), torch.ones(size, dtype=torch.int64), CONFIG
            )
            assert found.abs().max() == 0, (reward, size)


@pytest.mark.parametrize("tokens", [0, 1])
def test_whitening_fewer_than_two_tokens_gives_nothing(tokens: int) -> None:
    zeros = torch.zeros(1, dtype=torch.int64)
    found = advantages.whitened_returns(torch.ones(1).double(), zeros, torch.tensor([tokens]), CONFIG)
    assert found.tolist() == [0.0] * tokens


def estimate(estimator: advantages.Estimator, config: AlgorithmConfig) -> list[float]:
    tensors = torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(GROUPS), torch.tensor(LENGTHS)
    return estimator(*tensors, config).tolist()
