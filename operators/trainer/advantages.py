"""Advantage estimators: from the rewards of a batch to one advantage a trained token.

Each takes `Rewards` and the configuration's numbers, and gives float64[m]: sequence after sequence, its trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from operators.trainer.config import AlgorithmConfig


@dataclass(frozen=True, slots=True, eq=False)
class Rewards:
    """What n sequences of a batch earned, m trained tokens in all.

    outcomes float64[n], given with a sequence's last trained token; groups int64[n], dense numbers; lengths int64[n],
    trained tokens; penalties float64[m], taken from each token's reward; values float64[m], a critic's, of what stood
    before each token.
    """

    outcomes: Tensor
    groups: Tensor
    lengths: Tensor
    penalties: Tensor | None = None
    values: Tensor | None = None

    def of_sequences(self) -> Tensor:
        """Each sequence's whole reward, float64[n]."""
        if self.penalties is None:
            return self.outcomes
        sequences = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        return self.outcomes - self.outcomes.new_zeros(len(self.outcomes)).index_add(0, sequences, self.penalties)

    def of_tokens(self) -> Tensor:
        """Each token's reward, float64[m]."""
        rewards = self.outcomes.new_zeros(int(self.lengths.sum()))
        trained = self.lengths > 0
        rewards[self.lengths.cumsum(0)[trained] - 1] = self.outcomes[trained]
        return rewards if self.penalties is None else rewards - self.penalties


Estimator: TypeAlias = Callable[[Rewards, AlgorithmConfig], Tensor]


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


def group_normalised(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """A_i = (r_i − mean_g) / (std_g + ε), ddof 1. GRPO (arXiv 2402.03300, §4.1.2).

    A group of one has nothing to be compared with: its advantage is 0.
    """
    own = rewards.of_sequences()
    centred = own - group_means(own, rewards.groups)
    return (centred / (group_stds(own, rewards.groups) + config.std_epsilon)).repeat_interleave(rewards.lengths)


def group_centred(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """A_i = r_i − mean_g. Dr.GRPO (arXiv 2503.20783, §3.2)."""
    own = rewards.of_sequences()
    return (own - group_means(own, rewards.groups)).repeat_interleave(rewards.lengths)


def leave_one_out(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """A_i = r_i − mean of the others of its group = G/(G−1) · (r_i − mean_g). RLOO (arXiv 2402.14740, §3.3).

    A group of one has advantage 0.
    """
    own = rewards.of_sequences()
    sizes = torch.bincount(rewards.groups)[rewards.groups].double()
    centred = own - group_means(own, rewards.groups)
    return (centred * sizes / (sizes - 1).clamp(min=1)).repeat_interleave(rewards.lengths)


def whitened_returns(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """A = (R − ⟨R⟩) / sqrt(var_ddof1(R) + 1e-8) over the batch's tokens. REINFORCE++ (arXiv 2501.03262, §3).

    R_t = Σ_{s≥t} γ^(s−t) r_s.
    """
    return whiten(_returns(rewards.of_tokens(), rewards.lengths, config.discount))


def group_centred_whitened(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """`whitened_returns` of r_i − mean_g: REINFORCE++ with a group baseline (arXiv 2501.03262, §3)."""
    own = rewards.of_sequences()
    centred = Rewards(own - group_means(own, rewards.groups), rewards.groups, rewards.lengths)
    return whitened_returns(centred, config)


def generalised(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """`temporal_differences`, whitened over the batch's tokens. PPO (arXiv 1707.06347) with GAE."""
    return whiten(temporal_differences(rewards, config))


def temporal_differences(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """A_t = δ_t + γλ·A_{t+1}, δ_t = r_t + γV_{t+1} − V_t. GAE (arXiv 1506.02438, eq. 16).

    Tokens that are not trained are no steps: V and A go over them to the next trained one.
    """
    if rewards.values is None:
        raise ValueError("this advantage needs a critic's values")
    values = _padded(rewards.values, rewards.lengths)
    following = torch.cat([values[:, 1:], values.new_zeros(len(values), 1)], 1)
    deltas = _padded(rewards.of_tokens(), rewards.lengths) + config.discount * following - values
    return _unpadded(_discounted(deltas, config.discount * config.gae_lambda), rewards.lengths)


def value_targets(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """What a critic's values should have been, float64[m]: A + V, of A before it is whitened."""
    assert rewards.values is not None
    return temporal_differences(rewards, config) + rewards.values


def whiten(values: Tensor) -> Tensor:
    """(x − mean) / sqrt(var_ddof1 + 1e-8); zeros of fewer than two."""
    if len(values) < 2:
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.var(correction=1) + 1e-8).sqrt()


def _returns(token_rewards: Tensor, lengths: Tensor, discount: float) -> Tensor:
    return _unpadded(_discounted(_padded(token_rewards, lengths), discount), lengths)


def _discounted(steps: Tensor, factor: float) -> Tensor:
    """Σ_{s≥t} factor^(s−t) · steps_s of each row of float64[n, width]."""
    sums = torch.empty_like(steps)
    after = steps.new_zeros(len(steps))
    for place in range(steps.shape[1] - 1, -1, -1):
        after = steps[:, place] + factor * after
        sums[:, place] = after
    return sums


def _padded(values: Tensor, lengths: Tensor) -> Tensor:
    """Sequences one a row, float64[n, longest], 0 beyond their ends."""
    padded = values.new_zeros(len(lengths), int(lengths.max()) if len(lengths) else 0)
    padded[_within(lengths, padded.shape[1])] = values
    return padded


def _unpadded(padded: Tensor, lengths: Tensor) -> Tensor:
    return padded[_within(lengths, padded.shape[1])]


def _within(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width) < lengths[:, None]
