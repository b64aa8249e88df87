"""AdamW with parameter groups."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from infra.models.device_copies import moved, synchronize
from operators.trainer.config import LearnerConfig


def build_optimizer(parameters: Mapping[str, nn.Parameter], config: LearnerConfig) -> torch.optim.AdamW:
    """Fused AdamW (arXiv 1711.05101) over `parameters`, without weight decay for vectors (norms, biases).

    `config.parameter_groups` override both for the parameters they match. Each optimizer group has a `factor` that
    multiplies the learning rate.
    """
    members: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        override = next((group for group in config.parameter_groups if re.search(group.match, name)), None)
        decay = config.weight_decay if parameter.ndim >= 2 else 0.0
        if override is not None and override.weight_decay is not None:
            decay = override.weight_decay
        factor = 1.0 if override is None else override.learning_rate_factor
        members.setdefault((decay, factor), []).append(parameter)
    groups = [{"params": group, "weight_decay": decay, "factor": factor} for (decay, factor), group in members.items()]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon, fused=True)


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the moments of `optimizer` to `device`; parameters stay where they are. AdamW reads its step counts, single
    numbers, on the parameters' device: they stay there when the moments move to the host.
    """
    devices = {device}
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and (value.ndim or device.type != "cpu"):
                devices.add(value.device)
                state[name] = moved(value, device)
    synchronize(*devices)


def moments(optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """AdamW's state as named tensors: `exp_avg.<parameter>`, `exp_avg_sq.<parameter>`, `step.<parameter>`.

    Empty before the first step.
    """
    return {
        f"{kind}.{name}": optimizer.state[parameter][kind]
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for kind in ("exp_avg", "exp_avg_sq", "step")
    }


def allocate_moments(optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter]) -> None:
    """Allocate the state of every parameter that has none, as the first step would: zeros."""
    for parameter in parameters.values():
        if parameter not in optimizer.state:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
