"""A learner whose weights are a hash of the batches that it was trained with, so every version can be checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from infra.simulation.process import SimulatedProcess
from operators.trainer.emulation import TrainerEmulation
from operators.trainer.learner_contract import FullWeights
from operators.trainer.learner_state import LearnerState, StateSource
from operators.trainer.ranks import Ranks
from operators.trainer.weight_parts import NamedRange, WeightPart
from pipelines.simulate.trained_content import CONTENT_BYTES, INITIAL, next_content, row_number
from pipelines.simulate.transferred_bytes import tensors_of
from schemas.records import MicroBatch

STEP_S = 0.05
"""Seconds of an optimizer step."""
_STATE = "weights.content"


class SimulatedLearner:
    """A learner of `process`, as one of `ranks`, whose updates take the time of `emulation`.

    Each rank trains its rows, and a collective combines them, as gradients are. The whole state is `content`, the same
    on all ranks; of the tensors that are published each rank has its part.
    """

    model: PreTrainedModel = None

    def __init__(self, emulation: TrainerEmulation, process: SimulatedProcess, ranks: Ranks) -> None:
        self._emulation, self._process, self._ranks = emulation, process, ranks
        self._content = torch.tensor(list(bytes.fromhex(INITIAL)), dtype=torch.uint8)
        self.tensors = {name: torch.from_numpy(array.copy()) for name, array in self._published().items()}
        self.updates = self.skipped_updates = 0
        self.before_change: Callable[[], None] = lambda: None

    def update(self, rows: Sequence[MicroBatch]) -> dict[str, float]:
        """See `LearnerContract`: the weights change once all ranks have computed."""
        began = self._process.monotonic()
        names = [name for part in rows for name in part.trajectory_ids]
        own = torch.tensor([[row_number(name)] for name in names], dtype=torch.int64).reshape(-1, 1)
        numbers = torch.cat(self._ranks.gather(own)).flatten().tolist()
        self._process.sleep(self._emulation.seconds(sum(len(part.token_ids) for part in rows)))
        self._ranks.maximum(0)  # the sum of gradients
        self.before_change()
        self._process.sleep(STEP_S)
        self._set(next_content(bytes(self._content.tolist()).hex(), numbers))
        self.updates += 1
        return {"time/update": self._process.monotonic() - began}

    def weights(self, dtype: torch.dtype | None = None) -> FullWeights:
        """The weights; they are bytes, whatever the dtype."""
        return _Weights(self.tensors, self._ranks)

    def state(self) -> LearnerState:
        """Content and counts."""
        return LearnerState(
            weights={"content": self._content},
            moments={},
            random_state=torch.zeros(1, dtype=torch.uint8),
            updates=self.updates,
            skipped_updates=self.skipped_updates,
        )

    def restore(self, source: StateSource) -> None:
        """Continue from the content and counts of `source`."""
        content = torch.zeros(CONTENT_BYTES, dtype=torch.uint8)
        source.read(_STATE, 0, content)
        self._set(bytes(content.tolist()).hex())
        self.updates, self.skipped_updates = source.updates, source.skipped_updates

    def _set(self, content: str) -> None:
        self._content.copy_(torch.tensor(list(bytes.fromhex(content)), dtype=torch.uint8))
        for name, array in self._published().items():
            self.tensors[name].copy_(torch.from_numpy(array.copy()))

    def _published(self) -> Mapping[str, np.ndarray]:
        return tensors_of(bytes(self._content.tolist()).hex())


class _Weights:
    at_hand = True

    def __init__(self, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
        self._tensors, self._ranks = tensors, ranks

    def specs(self) -> dict[str, Tensor]:
        return {name: torch.empty_like(tensor, device="meta") for name, tensor in self._tensors.items()}

    def items(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            self._ranks.maximum(0)
            yield name, tensor

    def parts(self) -> Iterator[WeightPart]:
        rank, count = self._ranks.rank, self._ranks.count
        for name, tensor in self._tensors.items():
            begin, end = (len(tensor) * each // count for each in (rank, rank + 1))
            yield WeightPart((NamedRange(name, 0, len(tensor)),), begin, tensor[begin:end], tensor.dtype)
