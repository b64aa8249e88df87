"""AdamW by groups of parameters, and the learning rate of each update."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from operators.trainer.config import LearnerConfig
from operators.trainer.ranks import shard_like


def learning_rate(update: int, config: LearnerConfig) -> float:
    """The learning rate of update `update`, counted from 0: linear over `warmup_steps`, then the schedule.

    The first update has learning_rate / warmup_steps; a line or a cosine reaches `final_learning_rate` at
    `total_steps`.
    """
    if update < config.warmup_steps:
        return config.learning_rate * (update + 1) / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.learning_rate
    done = min(1.0, (update - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    left = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.final_learning_rate + (config.learning_rate - config.final_learning_rate) * left


def build_optimizer(parameters: Mapping[str, nn.Parameter], config: LearnerConfig) -> torch.optim.AdamW:
    """Fused AdamW (arXiv 1711.05101) over `parameters`; vectors (norms, biases) do not decay.

    Parameters that a `config.parameter_groups` names go by it. Each group has a `factor` for the learning rate of an
    update.
    """
    members: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        exception = next((group for group in config.parameter_groups if re.search(group.match, name)), None)
        decay = config.weight_decay if parameter.ndim >= 2 else 0.0
        if exception is not None and exception.weight_decay is not None:
            decay = exception.weight_decay
        factor = 1.0 if exception is None else exception.learning_rate_factor
        members.setdefault((decay, factor), []).append(parameter)
    groups = [{"params": group, "weight_decay": decay, "factor": factor} for (decay, factor), group in members.items()]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon, fused=True)


def moments(optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """AdamW's state as named tensors: `exp_avg.<parameter>`, `exp_avg_sq.<parameter>`, `step.<parameter>`; none
    before a step.
    """
    return {
        f"{kind}.{name}": optimizer.state[parameter][kind]
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for kind in ("exp_avg", "exp_avg_sq", "step")
    }


def restore_moments(
    optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]
) -> None:
    """Put back what `moments` gave. Raises ValueError where names or shapes are not those of `parameters`."""
    expected = {f"{kind}.{name}" for name in parameters for kind in ("exp_avg", "exp_avg_sq", "step")}
    wrong = set(state) ^ expected if state else set()
    for name, parameter in parameters.items() if state and not wrong else ():
        wrong |= {k for k in (f"exp_avg.{name}", f"exp_avg_sq.{name}") if state[k].shape != parameter.shape}
    if wrong:
        raise ValueError(f"the optimizer's state does not fit the model: {', '.join(sorted(wrong)[:3])}")
    optimizer.state.clear()
    for name, parameter in parameters.items() if state else ():
        optimizer.state[parameter] = {
            "step": state[f"step.{name}"].clone().to(parameter.device),
            **{kind: shard_like(state[f"{kind}.{name}"].clone(), parameter) for kind in ("exp_avg", "exp_avg_sq")},
        }
