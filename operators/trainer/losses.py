"""Policy losses per token, and the importance weights that correct for off-policy tokens.

μ is the behaviour policy (the rollout's), π_o the proximal policy, π the current policy. All tensors are [m] over the
trained tokens of whole sequences, logprobs in nats; `segments` maps each token to its sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from operators.trainer.config import KlKind
from operators.trainer.presets import Clip, Correction

_LOG_RATIO_LIMIT = 20.0  # e^20 exceeds every clip and cap, and does not overflow


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLogprobs:
    """Logprobs of the same tokens under π (with gradient), π_o and μ, float[m]; segments int64[m] in 0..sequences−1."""

    current: Tensor
    proximal: Tensor
    behaviour: Tensor
    segments: Tensor
    sequences: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """The loss of each token, float[m], and whether the clip changes its gradient: because its ratio is `below` the
    lower bound, or `above` an upper one, that of the dual clip included, bool[m]. Sequence ratios count by token."""

    values: Tensor
    below: Tensor
    above: Tensor


TokenLoss: TypeAlias = Callable[[PolicyLogprobs, Tensor, Clip], TokenLosses]


def importance_ratios(numerator: Tensor, denominator: Tensor) -> Tensor:
    """exp(numerator − denominator), with the difference limited to ±20."""
    return (numerator - denominator).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()


def segment_sums(values: Tensor, segments: Tensor, count: int) -> Tensor:
    """The sum of `values` of each segment, [count]."""
    return values.new_zeros(count).index_add(0, segments, values)


def segment_means(values: Tensor, segments: Tensor, count: int) -> Tensor:
    """The mean of `values` of each segment, [count]; 0 for an empty segment."""
    return segment_sums(values, segments, count) / segment_sums(torch.ones_like(values), segments, count).clamp(min=1)


def clipped_surrogate(policy: PolicyLogprobs, advantages: Tensor, clip: Clip) -> TokenLosses:
    """l = −min(ρA, clip(ρ, 1−ε_l, 1+ε_h)·A), ρ = π/π_o. PPO (arXiv 1707.06347, eq. 7), ε_h of DAPO (arXiv 2503.14476).

    With a dual clip c, where A < 0: l = min(l, −cA) (arXiv 1912.09729, eq. 5).
    """
    return _clip_loss(importance_ratios(policy.current, policy.proximal), advantages, clip)


def sequence_clipped_surrogate(policy: PolicyLogprobs, advantages: Tensor, clip: Clip) -> TokenLosses:
    """The clipped surrogate of s = sg(s_i)·π/sg(π), s_i = exp(mean_t log ρ_t). GSPO (arXiv 2507.18071)."""
    log_ratios = policy.current.detach() - policy.proximal
    sequence = segment_means(log_ratios, policy.segments, policy.sequences)[policy.segments]
    straight_through = policy.current - policy.current.detach()
    return _clip_loss((sequence + straight_through).clamp(max=_LOG_RATIO_LIMIT).exp(), advantages, clip)


def clipped_weight_reinforce(policy: PolicyLogprobs, advantages: Tensor, clip: Clip) -> TokenLosses:
    """l = −sg(clip(ρ, 1−ε_l, 1+ε_h))·A·log π: every token keeps its gradient. CISPO (arXiv 2506.13585, eq. 4).

    The clip limits the weight whatever the sign of A; a dual clip has no effect.
    """
    ratios, counted = importance_ratios(policy.current.detach(), policy.proximal), advantages != 0
    values = -ratios.clamp(1 - clip.low, 1 + clip.high) * advantages * policy.current
    return TokenLosses(values, (ratios < 1 - clip.low) & counted, (ratios > 1 + clip.high) & counted)


def correction_weights(policy: PolicyLogprobs, correction: Correction) -> Tensor:
    """w' of each token, without gradient, from w = π_o/μ or, at sequence level, the product of its sequence's w.

    Decoupled PPO (arXiv 2505.24298, eq. 5) and truncated importance sampling: min(w, C); masked (IcePop): w·1[lo ≤ w
    ≤ C].
    """
    log_weights = (policy.proximal - policy.behaviour).detach()
    if correction.kind == "none":
        return torch.ones_like(log_weights)
    if correction.level == "sequence":
        log_weights = segment_sums(log_weights, policy.segments, policy.sequences)[policy.segments]
    weights = log_weights.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
    if correction.kind == "truncate":
        return weights.clamp(correction.low, correction.cap)
    return weights * ((weights >= correction.low) & (weights <= correction.cap))


def kl_penalty(current: Tensor, reference: Tensor, kind: KlKind = "k3") -> Tensor:
    """An estimate of KL(π ‖ π_ref) at each token, d = log π − log π_ref, as in verl and J. Schulman's note.

    k1 = d: unbiased, may be negative; as a loss its expected gradient is 0, so it is for rewards. k2 = d²/2: ≥ 0, and
    its gradient is unbiased. k3 = e^−d + d − 1: ≥ 0 and unbiased; d is limited to ±20 and k3 to ±10.
    """
    difference = current - reference
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference**2
    limited = difference.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return ((-limited).exp() + limited - 1).clamp(max=10)


def value_loss(values: Tensor, before: Tensor, targets: Tensor, clip: float) -> Tensor:
    """½·max((V − R)², (clip(V, V_o ± ε_v) − R)²) of each token, V_o the values `before` the update.

    The clip of PPO's value function (arXiv 1707.06347's code; arXiv 2005.12729, §3).
    """
    clipped = before + (values - before).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - targets) ** 2, (clipped - targets) ** 2)


def _clip_loss(ratios: Tensor, advantages: Tensor, clip: Clip) -> TokenLosses:
    losses = -torch.minimum(ratios * advantages, ratios.clamp(1 - clip.low, 1 + clip.high) * advantages)
    below, above = (ratios < 1 - clip.low) & (advantages < 0), (ratios > 1 + clip.high) & (advantages > 0)
    if clip.dual is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -clip.dual * advantages), losses)
        above = above | ((ratios > clip.dual) & (advantages < 0))
    return TokenLosses(losses, below, above)
