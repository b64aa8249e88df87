"""Writes a run's checkpoints and its final model, with retries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from infra.models.checkpoint_folder import load_tokenizer, save_folder
from infra.storage import StorageFolder
from operators.trainer.checkpoint import list_checkpoints, write_checkpoint
from operators.trainer.persist import CheckpointError, persist
from operators.trainer.rank_training import RankTraining
from operators.trainer.training_config import TrainingConfig
from schemas.records import PolicyVersion


@dataclass(frozen=True)
class CheckpointWriter:
    """Writes checkpoints of `training` to `checkpoints`, and the final model with `model`'s tokenizer to `result`.

    All methods that write raise CheckpointError after `trainer.checkpoint_tries` attempts.
    """

    config: TrainingConfig
    training: RankTraining
    model: Path
    checkpoints: StorageFolder
    result: Path

    def kept(self) -> list[PolicyVersion]:
        """The versions of the newest `checkpoints_kept` checkpoints, oldest first."""
        newest = list_checkpoints(self.checkpoints)[-self.config.checkpoints_kept :]
        return [PolicyVersion.parse(folder.name) for folder in newest]

    def write(self) -> None:
        """Write a checkpoint of the current version, which is due."""
        state, position = self.training.state, self.training.position
        assert state is not None  # a checkpoint is due
        keep = {"keep": self.config.checkpoints_kept, "keep_every": self.config.keep_every}
        persist(lambda: write_checkpoint(self.checkpoints, state, position, **keep), self.config.checkpoint_tries)

    def write_result(self) -> None:
        """Write the final model, unless an earlier epoch has: weights are a function of the log."""
        if not self.result.exists():
            persist(self._save_result, self.config.checkpoint_tries)

    def _save_result(self) -> None:
        try:
            save_folder(self.training.plain_model(), load_tokenizer(self.model), self.result)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot write the final model to {self.result.absolute()}: {error}") from error
