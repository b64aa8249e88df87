"""Advantage estimators: one advantage per trained token, computed from the rewards of a batch.

Each estimator takes `Rewards` and an `AlgorithmConfig` and returns float64[m], the trained tokens in sequence order.
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
    """The rewards of n contexts of a batch with m trained tokens in all. A sequence is one context, or one for each
    conversation of an agent.

    outcomes float64[n], each given at the context's last trained token; groups int64[n], dense group numbers; lengths
    int64[n], trained tokens; penalties float64[m], subtracted from each token's reward; values float64[m], the critic's
    value of the context before each token; sequences int64[n], the sequence of each context, None: each is one.
    """

    outcomes: Tensor
    groups: Tensor
    lengths: Tensor
    penalties: Tensor | None = None
    values: Tensor | None = None
    sequences: Tensor | None = None

    def totals(self) -> Tensor:
        """The total reward of each context, float64[n]."""
        if self.penalties is None:
            return self.outcomes
        contexts = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        return self.outcomes - self.outcomes.new_zeros(len(self.outcomes)).index_add(0, contexts, self.penalties)

    def weights(self) -> Tensor | None:
        """The weight of each context in statistics of its group, float64[n]: a sequence has 1. None: all are 1."""
        if self.sequences is None or len(self.sequences) == int(self.sequences[-1]) + 1:
            return None
        return 1 / torch.bincount(self.sequences).double()[self.sequences]

    def per_token(self) -> Tensor:
        """The reward of each token, float64[m]."""
        rewards = self.outcomes.new_zeros(int(self.lengths.sum()))
        trained = self.lengths > 0
        rewards[self.lengths.cumsum(0)[trained] - 1] = self.outcomes[trained]
        return rewards if self.penalties is None else rewards - self.penalties


Estimator: TypeAlias = Callable[[Rewards, AlgorithmConfig], Tensor]


def group_means(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """The weighted mean of each value's group, float64[n]; exact where all values of a group are equal."""
    # Relative to the group's minimum: rounding must not give equal rewards an advantage, and their rows a pass.
    minimum = torch.full((int(groups.max()) + 1,), torch.inf, dtype=values.dtype)
    minimum = minimum.scatter_reduce(0, groups, values, "amin")[groups]
    above = values - minimum if weights is None else weights * (values - minimum)
    return minimum + (torch.bincount(groups, weights=above) / _group_sizes(groups, weights))[groups]


def group_stds(values: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """The standard deviation (ddof 1) of each value's group, float64[n]; 0 in a group of one value."""
    squares = (values - group_means(values, groups, weights)) ** 2
    sums = torch.bincount(groups, weights=squares if weights is None else weights * squares)
    return (sums / (_group_sizes(groups, weights) - 1).clamp(min=1)).sqrt()[groups]


def _group_sizes(groups: Tensor, weights: Tensor | None) -> Tensor:
    """The sequences of each group."""
    return torch.bincount(groups) if weights is None else torch.bincount(groups, weights=weights).round()


def group_normalised(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """A_i = (r_i − mean_g) / (std_g + ε), ddof 1. GRPO (arXiv 2402.03300, §4.1.2).

    A group of one has advantage 0, unless its conversations have different rewards.
    """
    spread = group_stds(rewards.totals(), rewards.groups, rewards.weights()) + config.std_epsilon
    spread = spread.where(spread != 0, 1.0)  # ε may be 0, and all rewards of a group equal: r_i − mean_g is 0, too
    return (_centred(rewards) / spread).repeat_interleave(rewards.lengths)


def group_centred(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """A_i = r_i − mean_g. Dr.GRPO (arXiv 2503.20783, §3.2)."""
    return _centred(rewards).repeat_interleave(rewards.lengths)


def _centred(rewards: Rewards) -> Tensor:
    totals = rewards.totals()
    return totals - group_means(totals, rewards.groups, rewards.weights())


def leave_one_out(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """A_i = r_i − mean of the other rewards of its group = G/(G−1) · (r_i − mean_g). RLOO (arXiv 2402.14740, §3.3).

    The others of a conversation are those of other sequences. A group of one has advantage 0, unless its conversations
    have different rewards.
    """
    totals, groups, weights = rewards.totals(), rewards.groups, rewards.weights()
    of_sequences = totals if weights is None else group_means(totals, rewards.sequences)  # type: ignore[arg-type]
    sizes = _group_sizes(groups, weights)[groups].double()
    centred = of_sequences - group_means(totals, groups, weights)
    advantages = centred * sizes / (sizes - 1).clamp(min=1) + (totals - of_sequences)
    return advantages.repeat_interleave(rewards.lengths)


def whitened_returns(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """A = (R − ⟨R⟩) / sqrt(var_ddof1(R) + 1e-8) over the batch's tokens. REINFORCE++ (arXiv 2501.03262, §3).

    R_t = Σ_{s≥t} γ^(s−t) r_s.
    """
    return whiten(_returns(rewards.per_token(), rewards.lengths, config.discount))


def group_centred_whitened(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """`whitened_returns` of r_i − mean_g: REINFORCE++ with a group baseline (arXiv 2501.03262, §3)."""
    return whitened_returns(Rewards(_centred(rewards), rewards.groups, rewards.lengths), config)


def generalised(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """`temporal_differences`, whitened over the batch's tokens. PPO (arXiv 1707.06347) with GAE."""
    return whiten(temporal_differences(rewards, config))


def temporal_differences(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """A_t = δ_t + γλ·A_{t+1}, δ_t = r_t + γV_{t+1} − V_t. GAE (arXiv 1506.02438, eq. 16).

    Only trained tokens are steps: V and A skip tokens that are not trained.
    """
    if rewards.values is None:
        raise ValueError("GAE needs a critic's values: choose an algorithm that has a critic (ppo)")
    values = _padded(rewards.values, rewards.lengths)
    following = torch.cat([values[:, 1:], values.new_zeros(len(values), 1)], 1)
    deltas = _padded(rewards.per_token(), rewards.lengths) + config.discount * following - values
    return _unpadded(_discounted(deltas, config.discount * config.gae_lambda), rewards.lengths)


def value_targets(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """The regression targets of a critic, float64[m]: A + V, with A before whitening."""
    assert rewards.values is not None
    return temporal_differences(rewards, config) + rewards.values


def whiten(values: Tensor) -> Tensor:
    """(x − mean) / sqrt(var_ddof1 + 1e-8); zeros for fewer than two values."""
    if len(values) < 2:
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.var(correction=1) + 1e-8).sqrt()


def _returns(token_rewards: Tensor, lengths: Tensor, discount: float) -> Tensor:
    return _unpadded(_discounted(_padded(token_rewards, lengths), discount), lengths)


def _discounted(steps: Tensor, factor: float) -> Tensor:
    """Σ_{s≥t} factor^(s−t) · steps_s of each row of float64[n, width]."""
    sums = torch.empty_like(steps)
    running = steps.new_zeros(len(steps))
    for column in range(steps.shape[1] - 1, -1, -1):
        running = steps[:, column] + factor * running
        sums[:, column] = running
    return sums


def _padded(values: Tensor, lengths: Tensor) -> Tensor:
    """One sequence per row, float64[n, longest], padded with 0."""
    padded = values.new_zeros(len(lengths), int(lengths.max()) if len(lengths) else 0)
    padded[_length_mask(lengths, padded.shape[1])] = values
    return padded


def _unpadded(padded: Tensor, lengths: Tensor) -> Tensor:
    return padded[_length_mask(lengths, padded.shape[1])]


def _length_mask(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width) < lengths[:, None]
