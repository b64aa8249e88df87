"""Training again from a log of batches, without a run around it: what was learned once, or what would have been."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from infra.models.checkpoint_folder import load_model, load_tokenizer, save_folder
from infra.models.weights import weight_tensors, weights_digest
from operators.trainer.assembly import BatchAssembly
from operators.trainer.learner import Learner
from operators.trainer.training_config import TrainingConfig
from schemas.records import MicroBatch


@dataclass(frozen=True, slots=True)
class Update:
    """One batch that was trained, or was not: then `why` says what is wrong with it and `values` is empty.

    `step` counts the optimizer steps so far.
    """

    batch: int
    step: int
    values: dict[str, float] = field(default_factory=dict)
    why: str | None = None


class Replay:
    """A learner of `model`, fed from a log. The same batches under the same configuration give the run's own bits."""

    def __init__(self, config: TrainingConfig, model: Path) -> None:
        torch.set_num_threads(config.threads)
        self._model = model
        self._learner = Learner(config.learner, model, config.device)
        self._trained = 0

    def train(self, parts: Iterable[tuple[MicroBatch, int, int]], most: int | None = None) -> Iterator[Update]:
        """Train the batches whose parts come with partition and offset, `most` of them where it is given.

        As in a run, a batch that cannot be trained is passed over.
        """
        assembly = BatchAssembly()
        for part, partition, offset in parts:
            for batch in assembly.add(part, partition, offset):
                if self._trained == most:
                    return
                yield self._update(batch.number, batch.parts)

    def save(self, folder: Path) -> None:
        """Write the model to the new folder `folder`. Raises FileExistsError if it is there."""
        save_folder(self._learner.plain_model(), load_tokenizer(self._model), folder)

    def digest(self) -> str:
        """`weights_digest` of the weights as they are."""
        return weights_digest(self._learner.state().weights)

    def _update(self, number: int, parts: tuple[MicroBatch, ...]) -> Update:
        try:
            values = self._learner.update(parts)
        except ValueError as error:
            return Update(number, self._trained, why=str(error))
        self._trained += 1
        return Update(number, self._trained, values)


def folder_digest(folder: Path) -> str:
    """`weights_digest` of the model in `folder`. Raises as `load_model` does."""
    return weights_digest(weight_tensors(load_model(folder)))
