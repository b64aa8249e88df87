"""Algorithms by name. Each combines an advantage estimator, a token loss, an aggregation and an off-policy correction.

The batch's loss is Σ_i c_i Σ_t w'_it · l_it over sequences i and their trained tokens t. The coefficients c depend on
the lengths of the whole batch, so the sum can be split in any way: into micro-batches, or without rows whose loss has
no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from operators.trainer import advantages, losses
from operators.trainer.config import AggregationName, AlgorithmConfig, LearnerConfig, Proximal
from operators.trainer.losses import Clip, Correction

_Record = TypeVar("_Record", Clip, Correction)
Coefficients: TypeAlias = Callable[[Tensor, int | None], Tensor]


def token_mean(lengths: Tensor, max_length: int | None) -> Tensor:
    """c_i = 1/Σ|y|: every token of the batch has the same weight. DAPO (arXiv 2503.14476, §3.3)."""
    return torch.full_like(lengths, 1, dtype=torch.float64) / lengths.sum().clamp(min=1)


def sequence_mean(lengths: Tensor, max_length: int | None) -> Tensor:
    """c_i = 1/(B·|y_i|): every sequence has the same weight. GRPO (arXiv 2402.03300, eq. 3)."""
    return 1.0 / (len(lengths) * lengths.double().clamp(min=1))


def constant_length(lengths: Tensor, max_length: int | None) -> Tensor:
    """c_i = 1/(B·L_max): independent of the batch's lengths. Dr.GRPO (arXiv 2503.20783, §3.2)."""
    if max_length is None:
        raise ValueError("algorithm.max_response_tokens must be set: the constant_length aggregation divides by it")
    return torch.full_like(lengths, 1, dtype=torch.float64) / (len(lengths) * max_length)


AGGREGATIONS: dict[AggregationName, Coefficients] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant_length": constant_length,
}


CLIP_HIGHER = Clip(0.2, 0.28)
SYMMETRIC = Clip(0.2, 0.2)
TRUNCATED = Correction("truncate", cap=5.0)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How a batch is trained.

    With `proximal` "update_start", π_o is the policy at the start of the update, and w = π_o/μ corrects for staleness
    (decoupled PPO, arXiv 2110.00641). With "behaviour", π_o = μ: ρ itself corrects for staleness, and w = 1.

    "update_start" is the default because batches are stale here. Ratios against μ are clipped where the policy has
    changed most since, so the tokens that decide an answer would have no gradient. On fresh batches both are the same.
    `critic` adds a second model that learns to predict returns.
    """

    advantage: advantages.Estimator
    loss: losses.TokenLoss = losses.clipped_surrogate
    aggregation: AggregationName = "token_mean"
    clip: Clip = CLIP_HIGHER
    proximal: Proximal = "update_start"
    correction: Correction = TRUNCATED
    critic: bool = False


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(advantages.group_normalised, aggregation="sequence_mean"),
    "dr_grpo": Algorithm(advantages.group_centred, aggregation="constant_length", clip=SYMMETRIC),
    "dapo": Algorithm(advantages.group_normalised),
    "rloo": Algorithm(advantages.leave_one_out, aggregation="sequence_mean", clip=SYMMETRIC),
    "reinforce_plus_plus": Algorithm(advantages.whitened_returns, clip=SYMMETRIC),
    "reinforce_plus_plus_baseline": Algorithm(advantages.group_centred_whitened, clip=SYMMETRIC),
    "gspo": Algorithm(
        advantages.group_normalised,
        losses.sequence_clipped_surrogate,
        aggregation="sequence_mean",
        clip=Clip(3e-4, 4e-4),
    ),
    # The clipped weight is π/μ, which is the off-policy correction itself.
    "cispo": Algorithm(
        advantages.group_normalised,
        losses.clipped_weight_reinforce,
        proximal="behaviour",
        correction=Correction("none"),
    ),
    "decoupled_ppo": Algorithm(advantages.group_normalised),
    "tis": Algorithm(advantages.group_normalised, correction=Correction("truncate", cap=2.0)),
    "icepop": Algorithm(advantages.group_normalised, correction=Correction("mask", low=0.5, cap=5.0)),
    "ppo": Algorithm(advantages.generalised, clip=SYMMETRIC, critic=True),
}


def resolve(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that `config` names, with its overrides. Raises ValueError for a missing `max_response_tokens`."""
    known = ALGORITHMS[config.name]
    algorithm = replace(
        known,
        aggregation=config.aggregation or known.aggregation,
        proximal=config.proximal or known.proximal,
        clip=_changed(known.clip, low=config.clip_low, high=config.clip_high, dual=config.dual_clip),
        correction=_changed(
            known.correction,
            kind=config.correction,
            level=config.correction_level,
            low=config.correction_low,
            cap=config.correction_cap,
        ),
    )
    AGGREGATIONS[algorithm.aggregation](torch.ones(1, dtype=torch.int64), config.max_response_tokens)
    return algorithm


def clip_can_bind(config: LearnerConfig) -> bool:
    """Whether an importance ratio can differ from 1: ratios are against μ, or a batch has several optimizer steps."""
    return resolve(config.algorithm).proximal == "behaviour" or config.mini_batches * config.epochs > 1


def unused_clip_warning(config: LearnerConfig) -> str | None:
    """A warning if a clip is configured (by a key, or by `gspo`, which differs in its clip) but can never bind."""
    algorithm = config.algorithm
    chosen = [key for key in ("clip_low", "clip_high", "dual_clip") if getattr(algorithm, key) is not None]
    chosen += ["name = gspo"] if algorithm.name == "gspo" else []
    if not chosen or clip_can_bind(config):
        return None
    return (
        f"trainer.learner.algorithm has a clip without effect ({', '.join(chosen)}): with one optimizer step per "
        "batch and ratios against the policy at the start of the update, every ratio is 1. Set "
        'trainer.learner.mini_batches or epochs above 1, or algorithm.proximal = "behaviour"'
    )


def _changed(record: _Record, **changes: Any) -> _Record:
    return replace(record, **{name: value for name, value in changes.items() if value is not None})
