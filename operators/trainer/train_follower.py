"""TrainFollower: a rank other than 0. It trains its part of every batch; rank 0 publishes (`train_batches.py`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from infra.runners.step_metrics import phase
from infra.storage import StorageFolder
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored
from operators.trainer.assembly import dead_letters
from operators.trainer.checkpoint import CheckpointPositions
from operators.trainer.checkpoint_writer import CheckpointWriter
from operators.trainer.clean_stop import fold_with_ranks, keep_with_rank_0
from operators.trainer.rank_services import PROCESS, RankServices
from operators.trainer.rank_training import RankTraining, start_rank_training
from operators.trainer.training_config import TrainingConfig
from schemas.records import MicroBatch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainFollower:
    """Trains `model` as rank `rank` > 0. The other fields are those of `TrainBatches`."""

    config: TrainingConfig
    shard: ShardConfig
    model: Path
    checkpoints: StorageFolder
    rank: int
    divisions: int = 1
    dtype: str = "float32"
    longest: int = 0

    def resumed(self) -> ShardConfig:
        """The shard, which reads from the newest checkpoint on."""
        partitions = self.config.partitions_of(self.rank, self.divisions)
        return replace(
            self.shard, start_positions=CheckpointPositions(self.checkpoints, partitions, self.config.checkpoint_tries)
        )

    def restore(self, restored: Restored, services: RankServices = PROCESS) -> _FollowerTraining:
        torch.set_num_threads(self.config.threads)
        client, run = self.shard.client, self.shard.run
        addresses, notes = services.addresses(client, run), services.role_notes(client, run)
        training = start_rank_training(
            *(self.config, self.model, self.checkpoints, self.rank, 0, self.divisions, addresses, notes),
            *(self.dtype, self.longest, services),
        )
        return _FollowerTraining(training, CheckpointWriter(self.config, training, self.checkpoints))


class _FollowerTraining:
    """One update per fold, as on rank 0."""

    def __init__(self, training: RankTraining, checkpoints: CheckpointWriter) -> None:
        self._training, self._checkpoints = training, checkpoints
        self._services = training.rendezvous.services

    def fold(self, polled: Polled) -> list[Output]:
        return fold_with_ranks(self._training, lambda: self._fold(polled))

    def _fold(self, polled: Polled) -> list[Output]:
        with phase("assemble batches"):
            for received in polled.records:
                if isinstance(received.record, MicroBatch):
                    self._training.add_part(received.record, received.partition, received.offset)
        outputs = dead_letters(self._training.take_rejected(), self._services.unix_ms())
        if not polled.caught_up:
            return outputs
        if self._training.next_batch is None:
            self._checkpoints.check()  # rank 0 waits for this rank's part as long as this rank runs
            self._training.check()
            return outputs
        try:
            self._training.train()
        except ValueError as error:
            log.error("a batch cannot be trained: %s", error)  # rank 0 writes the dead letter
        self._training.joint.after_training()
        if self._training.checkpoint_due:
            self._checkpoints.begin()
        return outputs

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        return Checkpoint(self._training.offsets())

    def busy(self) -> bool:
        return self._training.next_batch is not None

    def close(self) -> None:
        if self._services.stopping.is_set():
            keep_with_rank_0(self._training, self._checkpoints)
        self._checkpoints.close()
        self._training.joint.close()
