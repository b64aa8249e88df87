"""Records each optimizer step of a learner: weights before, gradient, weights after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from operators.trainer.ranks import ALONE, Ranks
from operators.trainer.trained_model import TrainedModel

Tensors: TypeAlias = dict[str, Tensor]


@dataclass
class OptimizerStep:
    """Tensors by parameter name, as sharded on this rank. `norm` is the gradient's before clipping."""

    before: Tensors
    gradient: Tensors = field(default_factory=dict)
    after: Tensors = field(default_factory=dict)
    norm: float = 0.0
    rate: float = 0.0


def record_steps(trained: TrainedModel, forced: list[OptimizerStep] | None = None) -> list[OptimizerStep]:
    """A list to which each step of `trained` is added as it is taken.

    With `forced`, step k begins from the weights that `forced[k]` began from.
    """
    steps: list[OptimizerStep] = []
    parameters, begin, step = trained._parameters, trained.zero_grad, trained.step

    def weights() -> Tensors:
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def recorded_begin() -> None:
        if forced is not None:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(forced[len(steps)].before[name])
        steps.append(OptimizerStep(weights()))
        begin()

    def recorded_step(rate: float, *, finite: bool) -> float:
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
        steps[-1].gradient = {
            name: torch.zeros_like(parameters[name]) if gradient is None else gradient.clone()
            for name, gradient in gradients.items()
        }
        steps[-1].norm, steps[-1].rate = step(rate, finite=finite), rate
        steps[-1].after = weights()
        return steps[-1].norm

    trained.zero_grad, trained.step = recorded_begin, recorded_step  # type: ignore[method-assign]
    return steps


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor], ranks: Ranks = ALONE) -> float:
    """The relative L2 distance ‖one − other‖ / ‖other‖ over all tensors of all ranks. A collective."""
    assert one.keys() == other.keys()
    left, right = (torch.cat([_held(each[name]) for name in sorted(other)]) for each in (one, other))
    apart, size = ranks.total([float(((left - right) ** 2).sum()), float((right**2).sum())])
    return float((apart / size) ** 0.5)


def _held(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).flatten().double()
