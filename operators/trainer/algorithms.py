"""The functions of each algorithm by its name: advantage estimator, token loss, critic. `presets.py` has its settings.

The batch's loss is Σ_i c_i Σ_t w'_it · l_it over sequences i and their trained tokens t. The coefficients c depend on
the lengths of the whole batch, so the sum can be split in any way: into micro-batches, or without rows whose loss has
no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from operators.trainer import advantages, losses
from operators.trainer.config import AggregationName, AlgorithmConfig, AlgorithmName, Proximal
from operators.trainer.presets import Clip, Correction, algorithm_problem, resolve_preset

Coefficients: TypeAlias = Callable[[Tensor, int | None], Tensor]


def token_mean(lengths: Tensor, max_length: int | None) -> Tensor:
    """c_i = 1/Σ|y|: every token of the batch has the same weight. DAPO (arXiv 2503.14476, §3.3)."""
    return torch.full_like(lengths, 1, dtype=torch.float64) / lengths.sum().clamp(min=1)


def sequence_mean(lengths: Tensor, max_length: int | None) -> Tensor:
    """c_i = 1/(B·|y_i|): every sequence has the same weight. GRPO (arXiv 2402.03300, eq. 3)."""
    return 1.0 / (len(lengths) * lengths.double().clamp(min=1))


def sequence_sum(lengths: Tensor, max_length: int | None) -> Tensor:
    """c_i = 1/B: a sequence is one action, whose logprob is the sum of its tokens'. RLOO (arXiv 2402.14740, §3.3)."""
    return torch.full_like(lengths, 1, dtype=torch.float64) / len(lengths)


def constant_length(lengths: Tensor, max_length: int | None) -> Tensor:
    """c_i = 1/(B·L_max): independent of the batch's lengths. Dr.GRPO (arXiv 2503.20783, §3.2)."""
    assert max_length is not None, "`resolve` refuses it"
    return torch.full_like(lengths, 1, dtype=torch.float64) / (len(lengths) * max_length)


AGGREGATIONS: dict[AggregationName, Coefficients] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant_length": constant_length,
}


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of an algorithm. `critic` adds a second model that learns to predict returns."""

    advantage: advantages.Estimator
    loss: losses.TokenLoss = losses.clipped_surrogate
    critic: bool = False


FUNCTIONS: dict[AlgorithmName, Functions] = {
    "tis": Functions(advantages.group_normalised),
    "grpo": Functions(advantages.group_normalised),
    "dr_grpo": Functions(advantages.group_centred),
    "dapo": Functions(advantages.group_normalised),
    "rloo": Functions(advantages.leave_one_out),
    "reinforce_plus_plus": Functions(advantages.whitened_returns),
    "reinforce_plus_plus_baseline": Functions(advantages.group_centred_whitened),
    "ppo": Functions(advantages.generalised, critic=True),
    "gspo": Functions(advantages.group_normalised, losses.sequence_clipped_surrogate),
    "cispo": Functions(advantages.group_normalised, losses.clipped_weight_reinforce),
    "decoupled_ppo": Functions(advantages.group_normalised),
    "icepop": Functions(advantages.group_normalised),
}


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How a batch is trained: the functions of an algorithm, and its preset with the overrides of a configuration."""

    advantage: advantages.Estimator
    loss: losses.TokenLoss
    critic: bool
    aggregation: AggregationName
    clip: Clip
    proximal: Proximal
    correction: Correction


def resolve(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that `config` names, with its overrides. Raises ValueError for an `algorithm_problem`."""
    functions, preset = FUNCTIONS[config.name], resolve_preset(config)
    if (problem := algorithm_problem(config)) is not None:
        raise ValueError(problem)
    return Algorithm(
        functions.advantage,
        functions.loss,
        functions.critic,
        preset.aggregation,
        preset.clip,
        preset.proximal,
        preset.correction,
    )
