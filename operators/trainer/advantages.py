"""Advantage estimators: from one reward a sequence to one advantage a trained token.

All share a signature: rewards float64[n], groups int64[n] (dense numbers), lengths int64[n] (trained tokens of each
sequence), and the configuration's numbers; they give float64[Σ lengths], sequence after sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from operators.trainer.config import AlgorithmConfig

Estimator: TypeAlias = Callable[[Tensor, Tensor, Tensor, AlgorithmConfig], Tensor]


def group_means(values: Tensor, groups: Tensor) -> Tensor:
    """The mean of each value's group, float64[n]; exactly their value where a group's are equal."""
    # Taken above the group's least, or rounding would give equal rewards an advantage, and their rows a pass.
    least = torch.full((int(groups.max()) + 1,), torch.inf, dtype=values.dtype)
    least = least.scatter_reduce(0, groups, values, "amin")[groups]
    return least + (torch.bincount(groups, weights=values - least) / torch.bincount(groups))[groups]


def group_stds(values: Tensor, groups: Tensor) -> Tensor:
    """The standard deviation (ddof 1) of each value's group, float64[n]; 0 in a group of one."""
    squares = torch.bincount(groups, weights=(values - group_means(values, groups)) ** 2)
    return (squares / (torch.bincount(groups) - 1).clamp(min=1)).sqrt()[groups]


def group_normalised(rewards: Tensor, groups: Tensor, lengths: Tensor, config: AlgorithmConfig) -> Tensor:
    """A_i = (r_i − mean_g) / (std_g + ε), ddof 1. GRPO (arXiv 2402.03300, §4.1.2).

    A group of one has nothing to be compared with: its advantage is 0.
    """
    centred = rewards - group_means(rewards, groups)
    return (centred / (group_stds(rewards, groups) + config.std_epsilon)).repeat_interleave(lengths)


def group_centred(rewards: Tensor, groups: Tensor, lengths: Tensor, config: AlgorithmConfig) -> Tensor:
    """A_i = r_i − mean_g. Dr.GRPO (arXiv 2503.20783, §3.2)."""
    return (rewards - group_means(rewards, groups)).repeat_interleave(lengths)


def leave_one_out(rewards: Tensor, groups: Tensor, lengths: Tensor, config: AlgorithmConfig) -> Tensor:
    """A_i = r_i − mean of the others of its group = G/(G−1) · (r_i − mean_g). RLOO (arXiv 2402.14740, §3.3).

    A group of one has advantage 0.
    """
    sizes = torch.bincount(groups)[groups].double()
    return ((rewards - group_means(rewards, groups)) * sizes / (sizes - 1).clamp(min=1)).repeat_interleave(lengths)


def whitened_returns(rewards: Tensor, groups: Tensor, lengths: Tensor, config: AlgorithmConfig) -> Tensor:
    """A = (R − ⟨R⟩) / sqrt(var_ddof1(R) + 1e-8) over the batch's tokens. REINFORCE++ (arXiv 2501.03262, §3).

    R_t = γ^(T−t) r: the reward is given with a sequence's last token.
    """
    returns = rewards.repeat_interleave(lengths)
    if config.discount != 1:
        to_go = lengths.cumsum(0).repeat_interleave(lengths) - 1 - torch.arange(len(returns))
        returns = returns * config.discount ** to_go.double()
    return _whiten(returns)


def group_centred_whitened(rewards: Tensor, groups: Tensor, lengths: Tensor, config: AlgorithmConfig) -> Tensor:
    """`whitened_returns` of r_i − mean_g: REINFORCE++ with a group baseline (arXiv 2501.03262, §3)."""
    return whitened_returns(rewards - group_means(rewards, groups), groups, lengths, config)


def _whiten(values: Tensor) -> Tensor:
    if len(values) < 2:
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.var(correction=1) + 1e-8).sqrt()
