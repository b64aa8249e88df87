"""Passes over the micro-batches of a batch: forward scores, and gradients of policy and critic."""

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
from operators.trainer.policy import PolicyModule

Parts = Iterable[TrainingMicroBatch]


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTargets:
    """Inputs of the policy's loss for each trained token of the batch, on the host.

    advantages float64[m]; proximal float32[m] logprobs, None if they are the current policy's; reference float32[m]
    logprobs, None if the loss has no KL penalty.
    """

    advantages: Tensor
    proximal: Tensor | None
    reference: Tensor | None


@torch.no_grad()
def score_tokens(score: Callable[[TrainingMicroBatch], Tensor], parts: Parts, tokens: int) -> Tensor:
    """`score` of each of a batch's `tokens` trained tokens, float32[tokens]; 0 for tokens in no part."""
    scored = [(part.places, score(part).float()) for part in parts]  # all are queued before the first is awaited
    scores = torch.zeros(tokens)
    for places, values in scored:
        scores[places] = values.cpu()
    return scores


def policy_gradient(
    model: PolicyModule,
    parts: Parts,
    targets: PolicyTargets,
    coefficients: Tensor,
    algorithm: Algorithm,
    config: AlgorithmConfig,
    scale: float,
    token_metrics: TokenMetrics,
    mismatch: Mismatch | None = None,
) -> float:
    """Accumulate `scale` times the gradient of the policy's loss over `parts`, and return the loss.

    coefficients float64[n] are the aggregation coefficients of the batch's sequences.
    """
    total = coefficients.new_zeros(())
    for part in parts:
        current, entropies = model(part.packed, True)
        if algorithm.proximal == "behaviour":
            proximal = part.behaviour
        else:
            proximal = current.detach() if targets.proximal is None else part.select_tokens(targets.proximal)
        policy = PolicyLogprobs(current, proximal, part.behaviour, part.segments, part.sequences)
        advantages = part.select_tokens(targets.advantages)
        weights = correction_weights(policy, algorithm.correction)
        of_tokens = algorithm.loss(policy, advantages, algorithm.clip)
        losses = weights * of_tokens.values
        penalty = None
        if targets.reference is not None:
            penalty = kl_penalty(current, part.select_tokens(targets.reference), config.kl_kind)
            losses = losses + config.kl_coefficient * penalty
        loss = (part.select_sequences(coefficients) * losses).sum()
        torch.autograd.backward(scale * loss)
        assert entropies is not None
        token_metrics.add(policy, of_tokens, weights, entropies, penalty)
        if mismatch is not None:
            mismatch.add(current, part.behaviour, part.rows)
        total = total.to(loss.device) + loss.detach()
    return float(total)


def critic_gradient(
    critic: Critic, parts: Parts, before: Tensor, returns: Tensor, clip: float, tokens: int, scale: float
) -> float:
    """Accumulate `scale` times the gradient of the value losses over `parts`, summed and divided by `tokens`.

    Returns that loss. before float[m] are the values at the start of the update, returns float[m] their targets.
    """
    total = before.new_zeros(())
    for part in parts:
        losses = value_loss(critic(part.packed), part.select_tokens(before), part.select_tokens(returns), clip)
        loss = losses.sum() / tokens
        torch.autograd.backward(scale * loss)
        total = total.to(loss.device) + loss.detach()
    return float(total)
