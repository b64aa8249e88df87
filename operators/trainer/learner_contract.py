"""The interface of a learner: construct, update, weights, state, restore.

A learner trains one model, of which this rank has a part; all ranks call its methods in the same order, since each may
be a collective. `learner.py` is the implementation, by FSDP2. The setting `trainer.learner.name` names another one
(torchtitan's or Megatron's parallelism, say), a class or function that is an `OpenLearner`: assembly of batches,
rendezvous, publication, checkpoints, replay and export know this interface alone.
`tests/operators/trainer/test_learner_contract.py` runs against any of them, on one rank and on two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from operators.trainer.config import LearnerConfig
from operators.trainer.learner_state import LearnerState, StateSource
from operators.trainer.ranks import Ranks
from operators.trainer.weight_parts import WeightPart
from schemas.records import MicroBatch


class FullWeights(Protocol):
    """The weights of the plain model, as rollouts load them, under its names in a checkpoint."""

    @property
    def at_hand(self) -> bool:
        """Whether `parts` are views of this rank's memory, found without the other ranks: they are then taken at once,
        and written while the next update computes its gradients."""

    def specs(self) -> dict[str, Tensor]:
        """Names, dtypes and full shapes, as tensors on the meta device."""

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor with its name, in the order of `specs`: whole, until the next one is taken. A collective."""

    def parts(self) -> Iterator[WeightPart]:
        """This rank's elements of each tensor: as many parts on every rank, in one order. A collective unless
        `at_hand`."""


class LearnerContract(Protocol):
    """A model that is trained on global batches.

    The same batches from the same state give bit-identical weights with the same ranks: on CPUs with as many threads,
    on GPUs of one kind with the same versions of torch and its libraries, unless `LearnerConfig.deterministic` is off.
    """

    before_change: Callable[[], None]
    """Called before weights or moments change: it returns once nobody reads them any more."""

    @property
    def model(self) -> PreTrainedModel:
        """A model with the config of the final model's folder; its parameters may be this rank's parts."""

    @property
    def updates(self) -> int:
        """Batches taken."""

    @property
    def skipped_updates(self) -> int:
        """Optimizer steps skipped because their gradient was not finite."""

    def update(self, rows: Sequence[MicroBatch]) -> dict[str, float]:
        """Train one global batch, whose parts on this rank are `rows`, and return metrics.

        Raises ValueError, on every rank, for data that cannot be trained on; weights, moments and `updates` are then as
        they were.
        """

    def weights(self, dtype: torch.dtype | None = None) -> FullWeights:
        """The weights, rounded to `dtype` if given. They follow later updates."""

    def state(self) -> LearnerState:
        """All that a checkpoint holds: this rank's parts, not copied. An update changes them after `before_change`."""

    def restore(self, source: StateSource) -> None:
        """Restore `source`, which any number of ranks may have written: the learner continues as its writer would.

        Raises ValueError if names or shapes are not this model's; nothing has changed then.
        """


OpenLearner = Callable[[LearnerConfig, Path, str, Ranks], LearnerContract]
"""Opens a learner of the model in a folder, on a device, as one of ranks."""
