"""FinalModel: the trained model as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from infra.models.checkpoint_folder import load_tokenizer, write_model
from operators.trainer.persist import CheckpointError, persist
from operators.trainer.rank_training import RankTraining


@dataclass(frozen=True)
class FinalModel:
    """Writes the weights of `training` to the Hugging Face folder `folder`, with the tokenizer of `model`."""

    training: RankTraining
    model: Path
    folder: Path
    tries: int

    def write(self) -> None:
        """Write it, unless an earlier epoch has: weights are a function of the log.

        Raises CheckpointError after `tries` attempts.
        """
        if not self.folder.exists():
            persist(self._write, self.tries)

    def _write(self) -> None:
        weights = self.training.full_weights
        try:
            write_model(self.training.model, load_tokenizer(self.model), weights.specs(), weights.items(), self.folder)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot write the final model to {self.folder.absolute()}: {error}") from error
