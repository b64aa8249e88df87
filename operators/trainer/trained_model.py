"""A trained model (policy or critic) and its optimizer: gradient clipping, steps, state."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, KeysView, Mapping

import torch
from torch import Tensor, nn

from infra.models.device_copies import move_module, moved, synchronize
from operators.trainer.config import LearnerConfig
from operators.trainer.device_sharing import HOST
from operators.trainer.ranks import full_tensor, release_gathered


class TrainedModel:
    """`module` with its optimizer. The caller accumulates gradients, then calls `step`.

    `before_change` is called before weights and moments change: it waits until nobody reads them.
    """

    def __init__(self, module: nn.Module, config: LearnerConfig, before_change: Callable[[], None]) -> None:
        self._module, self._before_change = module, before_change
        release_gathered(module)  # its parameters are the shards then
        # Trained parameters, tied weights once, under the names of the model's weights.
        self._parameters = {name.removeprefix("model."): p for name, p in module.named_parameters() if p.requires_grad}
        self._optimizer = build_optimizer(self._parameters, config)
        self._max_gradient_norm = config.max_gradient_norm
        self._offloads_moments = "moments" in config.offload

    @property
    def names(self) -> KeysView[str]:
        """The names of the trained parameters."""
        return self._parameters.keys()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self._optimizer.zero_grad()

    def step(self, rate: float, *, finite: bool) -> float:
        """Clip the gradient, take a step with learning rate `rate`, and return the gradient's 2-norm before clipping.

        A gradient that is not finite takes no step. Neither does one whose loss is not `finite` on some rank: its norm
        is NaN. `finite` must be the same on all ranks, because copies of the model compute their norms apart.
        Afterwards the gradients are cleared: until the next step, other models have their memory.
        """
        release_gathered(self._module)
        for parameter in self._parameters.values():
            if parameter.grad is None:  # a batch with all rows skipped still decays moments and weights
                parameter.grad = torch.zeros_like(parameter)
            if not finite:
                parameter.grad.fill_(math.nan)
        norm = float(full_tensor(nn.utils.clip_grad_norm_(self._parameters.values(), self._max_gradient_norm)))
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = rate * group["factor"]
            self._before_change()
            self._move_moments(next(iter(self._parameters.values())).device)
            self._optimizer.step()
            self._move_moments(HOST)
        self._optimizer.zero_grad()
        return norm

    def move(self, device: torch.device) -> None:
        """Move weights and moments to `device`; parameters stay the same objects."""
        move_module(self._module, device)
        if not self._offloads_moments:
            move_state(self._optimizer, device)

    def _move_moments(self, device: torch.device) -> None:
        """Move the moments to `device` if they are offloaded between steps."""
        if self._offloads_moments:
            move_state(self._optimizer, device)

    def weights(self) -> dict[str, Tensor]:
        """The trained parameters by name, detached; of a sharded one this rank's part."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def moments(self) -> dict[str, Tensor]:
        """AdamW's state by name, not copied: `exp_avg.<parameter>`, `exp_avg_sq.<parameter>`, `step.<parameter>`.

        Empty before the first step.
        """
        return {
            f"{kind}.{name}": self._optimizer.state[parameter][kind]
            for name, parameter in self._parameters.items()
            if parameter in self._optimizer.state
            for kind in ("exp_avg", "exp_avg_sq", "step")
        }

    def allocate_moments(self) -> dict[str, Tensor]:
        """`moments`; zeros for a parameter that has none, as the first step would allocate."""
        for parameter in self._parameters.values():
            if parameter not in self._optimizer.state:
                self._optimizer.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        self._move_moments(HOST)
        return self.moments()

    def moment_shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """The full shapes of the moments after a step, by their names with `prefix`."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        kinds = {f"{prefix}{kind}.{name}": s for name, s in shapes.items() for kind in ("exp_avg", "exp_avg_sq")}
        return kinds | {f"{prefix}step.{name}": () for name in shapes}

    def clear_moments(self) -> None:
        """Return to the state before the first step."""
        self._optimizer.state.clear()


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


def reject_unmatched_groups(config: LearnerConfig, names: Iterable[str]) -> None:
    """Raise ValueError if one of `config.parameter_groups` matches none of `names`, those of trained parameters."""
    known = list(names)
    for group in config.parameter_groups:
        if not any(re.search(group.match, name) for name in known):
            raise ValueError(
                f"trainer.learner.parameter_groups: match = {group.match!r} matches no trained parameter, such as "
                f"{known[0]} and {known[-1]}: correct it, or remove the group"
            )


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
