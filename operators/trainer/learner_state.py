"""The learner's state: what a checkpoint holds. Of a sharded tensor each rank has its own part; nothing is gathered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from infra.models.local_part import local_part

RANDOM_STATE = "random_state"


class StateSource(Protocol):
    """A state to restore: of this process or of a checkpoint."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The full shape of each tensor of the state, by the names of `LearnerState.tensors`."""

    @property
    def updates(self) -> int: ...

    @property
    def skipped_updates(self) -> int: ...

    def read(self, name: str, begin: int, into: Tensor) -> None:
        """Fill `into`, [n], with the n elements of the flattened tensor `name` from `begin` on."""


@dataclass(frozen=True, slots=True, eq=False)
class LearnerState:
    """The learner's whole state: weights and optimizer moments by name, of the policy and of the critic if any, torch's
    random state, and the number of batches taken. With LoRA the policy's weights are those of the adapters alone.

    Tensors are the learner's own, not copies: write or copy them before the next optimizer step.
    """

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    random_state: Tensor
    updates: int
    skipped_updates: int
    critic_weights: Mapping[str, Tensor] = field(default_factory=dict)
    critic_moments: Mapping[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, each kind with a prefix."""
        kinds = {
            "weights.": self.weights,
            "moments.": self.moments,
            "critic.weights.": self.critic_weights,
            "critic.moments.": self.critic_moments,
        }
        named = {prefix + name: tensor for prefix, tensors in kinds.items() for name, tensor in tensors.items()}
        return named | {RANDOM_STATE: self.random_state}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors().items()}

    def read(self, name: str, begin: int, into: Tensor) -> None:
        part = local_part(self.tensors()[name])
        into.copy_(part.elements[begin - part.begin : begin - part.begin + len(into)])


def check_shapes(
    own: Mapping[str, tuple[int, ...]], source: Mapping[str, tuple[int, ...]], prefix: str, whose: str
) -> None:
    """Raise ValueError if the tensors of `source` whose names begin with `prefix` are not those of `own`."""
    found = {name: shape for name, shape in source.items() if name.startswith(prefix)}
    expected = {name: shape for name, shape in own.items() if name.startswith(prefix)}
    mismatched = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if mismatched:
        first = mismatched[0]
        shapes = f"shape {found.get(first, 'none')} instead of {expected.get(first, 'none')}"
        names = ", ".join(name.removeprefix(prefix) for name in mismatched[:3])
        raise ValueError(
            f"the state's {prefix.strip('.')} do not match the {whose}: {names} ({shapes} for the first). The "
            "model and [trainer.learner] must be those of the run that wrote it"
        )


@torch.no_grad()
def read_into(source: StateSource, tensors: Mapping[str, Tensor]) -> None:
    """Read this rank's part of each of `tensors` from `source`, one at a time."""
    for name, tensor in tensors.items():
        part = local_part(tensor)
        if len(part.elements):
            source.read(name, part.begin, part.elements)
