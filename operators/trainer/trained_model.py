"""A model that is trained, with its optimizer: clip, step, state. The policy is one; so is the critic."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from operators.trainer.config import LearnerConfig
from operators.trainer.optimizer import build_optimizer, moments, restore_moments
from operators.trainer.ranks import full_tensor, shard_like


class TrainedModel:
    """`module`, whose gradients the caller adds up before it asks for a step."""

    def __init__(self, module: nn.Module, config: LearnerConfig) -> None:
        self._module = module
        # What is trained, tied weights once, under the names that the model's own weights have.
        self._parameters = {name.removeprefix("model."): p for name, p in module.named_parameters() if p.requires_grad}
        self._optimizer = build_optimizer(self._parameters, config)
        self._bound = config.max_gradient_norm

    def begin(self) -> None:
        """Forget the last gradients."""
        self._optimizer.zero_grad()

    def step(self, rate: float) -> float:
        """Clip the gradient and take a step of learning rate `rate`; the gradient's 2-norm from before it was clipped.

        A gradient that is not finite takes no step.
        """
        for parameter in self._parameters.values():
            if parameter.grad is None:  # a batch in which every row was skipped still decays moments and weights
                parameter.grad = torch.zeros_like(parameter)
        norm = float(full_tensor(nn.utils.clip_grad_norm_(self._parameters.values(), self._bound)))
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = rate * group["factor"]
            self._optimizer.step()
        return norm

    def move(self, device: torch.device) -> None:
        """Weights, gradients and moments to `device`; parameters stay the same objects."""
        self._module.to(device)
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state by name; the optimizer's own tensors where this rank has all of them."""
        return {name: full_tensor(tensor) for name, tensor in moments(self._optimizer, self._parameters).items()}

    def restore_moments(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `moments` gave. Raises ValueError where names or shapes are not this model's."""
        restore_moments(self._optimizer, self._parameters, state)


def check_state(own: Mapping[str, Tensor], state: Mapping[str, Tensor], whose: str) -> None:
    """Raise ValueError where the names or shapes of `state` are not those of `own`."""
    wrong = set(state) ^ set(own)
    wrong |= {name for name in set(own) - wrong if state[name].shape != own[name].shape}
    if wrong:
        raise ValueError(f"the state's weights do not fit the {whose}: {', '.join(sorted(wrong)[:3])}")


@torch.no_grad()
def copy_into(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Set each tensor of `own` to what `state` has under its name."""
    for name, tensor in own.items():
        tensor.copy_(shard_like(state[name], tensor))
