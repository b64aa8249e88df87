"""A trained model (policy or critic) and its optimizer: gradient clipping, steps, state."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from operators.trainer.config import LearnerConfig
from operators.trainer.optimizer import build_optimizer, moments, restore_moments
from operators.trainer.ranks import full_tensor, shard_like


class TrainedModel:
    """`module` with its optimizer. The caller accumulates gradients, then calls `step`."""

    def __init__(self, module: nn.Module, config: LearnerConfig) -> None:
        self._module = module
        # Trained parameters, tied weights once, under the names of the model's weights.
        self._parameters = {name.removeprefix("model."): p for name, p in module.named_parameters() if p.requires_grad}
        self._optimizer = build_optimizer(self._parameters, config)
        self._max_gradient_norm = config.max_gradient_norm

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self._optimizer.zero_grad()

    def step(self, rate: float) -> float:
        """Clip the gradient, take a step with learning rate `rate`, and return the gradient's 2-norm before clipping.

        A gradient that is not finite takes no step.
        """
        for parameter in self._parameters.values():
            if parameter.grad is None:  # a batch with all rows skipped still decays moments and weights
                parameter.grad = torch.zeros_like(parameter)
        norm = float(full_tensor(nn.utils.clip_grad_norm_(self._parameters.values(), self._max_gradient_norm)))
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = rate * group["factor"]
            self._optimizer.step()
        return norm

    def move(self, device: torch.device) -> None:
        """Move weights, gradients and moments to `device`; parameters stay the same objects."""
        self._module.to(device)
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's full state by name; not copied if this is the only rank. A collective."""
        return {name: full_tensor(tensor) for name, tensor in moments(self._optimizer, self._parameters).items()}

    def restore_moments(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors of `moments`. Raises ValueError if names or shapes are not this model's."""
        restore_moments(self._optimizer, self._parameters, state)


def check_state(own: Mapping[str, Tensor], state: Mapping[str, Tensor], whose: str) -> None:
    """Raise ValueError if the names or shapes of `state` are not those of `own`."""
    mismatched = set(state) ^ set(own)
    mismatched |= {name for name in set(own) - mismatched if state[name].shape != own[name].shape}
    if mismatched:
        raise ValueError(f"the state's weights do not match the {whose}: {', '.join(sorted(mismatched)[:3])}")


@torch.no_grad()
def copy_into(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy each tensor of `state` into the tensor of `own` with the same name."""
    for name, tensor in own.items():
        tensor.copy_(shard_like(state[name], tensor))
