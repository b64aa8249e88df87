"""Passes over the micro-batches of a batch: how a model sees its tokens, and gradients of policy and critic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from operators.trainer.algorithms import Algorithm
from operators.trainer.config import AlgorithmConfig
from operators.trainer.critic import Critic
from operators.trainer.losses import PolicyLogprobs, correction_weights, kl_penalty, value_loss
from operators.trainer.metrics import TokenMetrics
from operators.trainer.mismatch import Mismatch
from operators.trainer.packing import TrainingMicroBatch
from operators.trainer.policy import Policy

Parts = Iterable[TrainingMicroBatch]


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTargets:
    """What the policy's loss needs of each trained token of the batch, on the host.

    advantages float64[m]; proximal float32[m] logprobs, None where they are those of the policy at hand; reference
    float32[m] logprobs, None without a penalty in the loss.
    """

    advantages: Tensor
    proximal: Tensor | None
    reference: Tensor | None


@torch.no_grad()
def score_tokens(score: Callable[[TrainingMicroBatch], Tensor], parts: Parts, tokens: int) -> Tensor:
    """What `score` says of each of a batch's `tokens` trained tokens, float32[tokens]; 0 for those in no part."""
    seen = torch.zeros(tokens)
    for part in parts:
        seen[part.places] = score(part).float().cpu()
    return seen


def policy_gradient(
    model: Policy,
    parts: Parts,
    targets: PolicyTargets,
    coefficients: Tensor,
    algorithm: Algorithm,
    config: AlgorithmConfig,
    scale: float,
    observed: TokenMetrics,
    mismatch: Mismatch | None = None,
) -> float:
    """Add `scale` times the gradient of the policy's loss over `parts`, and return the loss.

    coefficients float64[n] are the aggregation's, of the batch's sequences.
    """
    total = coefficients.new_zeros(())
    for part in parts:
        current, entropies = model(part.packed, True)
        if algorithm.proximal == "behaviour":
            proximal = part.behaviour
        else:
            proximal = current.detach() if targets.proximal is None else part.of_tokens(targets.proximal)
        policy = PolicyLogprobs(current, proximal, part.behaviour, part.segments, part.sequences)
        advantages = part.of_tokens(targets.advantages)
        weights = correction_weights(policy, algorithm.correction)
        losses = weights * algorithm.loss(policy, advantages, algorithm.clip)
        penalty = None
        if targets.reference is not None:
            penalty = kl_penalty(current, part.of_tokens(targets.reference), config.kl_kind)
            losses = losses + config.kl_coefficient * penalty
        loss = (part.of_sequences(coefficients) * losses).sum()
        torch.autograd.backward(scale * loss)
        assert entropies is not None
        observed.add(policy, advantages, weights, entropies, algorithm.clip, penalty)
        if mismatch is not None:
            mismatch.add(current, part.behaviour, part.rows)
        total = total.to(loss.device) + loss.detach()
    return float(total)


def critic_gradient(
    critic: Critic, parts: Parts, before: Tensor, returns: Tensor, clip: float, tokens: int, scale: float
) -> float:
    """Add `scale` times the gradient of the sum over `parts` of value losses / `tokens`, and return that.

    before float[m] are the values that the update began with, returns float[m] what they should have been.
    """
    total = before.new_zeros(())
    for part in parts:
        losses = value_loss(critic(part.packed), part.of_tokens(before), part.of_tokens(returns), clip)
        loss = losses.sum() / tokens
        torch.autograd.backward(scale * loss)
        total = total.to(loss.device) + loss.detach()
    return float(total)
