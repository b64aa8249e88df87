"""Trains the log of batches as one rank: the part that all ranks have in common."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infra.storage import StorageFolder
from operators.io.elements import PartitionKey
from operators.trainer.assembly import BatchAssembly, RejectedMicroBatch, WholeBatch, empty_reason
from operators.trainer.checkpoint import TrainerPosition, list_checkpoints, read_checkpoint
from operators.trainer.learner import Learner, LearnerState
from operators.trainer.ranks import Ranks
from operators.trainer.rendezvous import Rendezvous, join_process_group
from operators.trainer.training_config import TrainingConfig
from schemas.records import MicroBatch, PolicyVersion
from schemas.topics import BATCHES, batch_partitions

log = logging.getLogger(__name__)


class RankTraining:
    """Trains `model` on whole batches in order, from the newest of `checkpoints` on, as one rank of `rendezvous`.
    `shards` is the number of buffer shards that write the batches.

    Ranks need no coordinator: a batch is whole for all ranks or for none, and each rank's actions are a function of its
    batches, so all ranks call the same collectives in the same order.
    """

    weights: Mapping[str, Tensor]
    """The policy's full weights after the last update."""
    state: LearnerState | None
    """The learner's full state after the last update if a checkpoint is due, else None."""

    def __init__(
        self,
        config: TrainingConfig,
        model: Path,
        checkpoints: StorageFolder,
        epoch: int,
        rendezvous: Rendezvous | None = None,
        shards: int = 1,
    ) -> None:
        self._config, self._epoch, self._rendezvous = config, epoch, rendezvous or Rendezvous()
        ranks = self._rendezvous.ranks
        self._learner = Learner(config.learner, model, config.device_of(ranks.rank), ranks)
        self._partitions = batch_partitions(ranks.rank, shards)
        self.position = TrainerPosition(PolicyVersion(epoch, 0), (0,) * ranks.count * shards, 0)
        self.resumed_from: PolicyVersion | None = None
        if found := list_checkpoints(checkpoints):
            state, self.position = read_checkpoint(found[-1])
            self._learner.restore(state)
            self.resumed_from = self.position.version
            log.info("resumed from checkpoint %s as epoch %d", self.resumed_from, epoch)
        position, own = self.position, self._partitions
        self._assembly = BatchAssembly(
            own,
            shards=shards,
            first=position.version.number,
            lost=config.lost_batches,
            starts=position.batch_offsets[own.start : own.stop],
        )
        self._complete: deque[WholeBatch] = deque(self._assembly.take())
        self._missing_since: float | None = None
        self._nonfinite: list[str] = []
        """The consecutive last batches whose gradient was not finite."""
        resumed = self.resumed_from or PolicyVersion(0, 0)
        self._exchange("begin with the same checkpoint", [resumed.epoch, resumed.number])
        self._snapshot()

    @property
    def trained(self) -> int:
        """Number of batches taken. Each makes a version, so this is also the number of the next batch."""
        return self.position.version.number

    @property
    def done(self) -> bool:
        """Whether all `optimizer_steps` batches are taken."""
        return self.trained >= self._config.optimizer_steps

    @property
    def checkpoint_due(self) -> bool:
        """Whether the current version needs a checkpoint."""
        return self.trained > 0 and (self.done or self.trained % self._config.checkpoint_every == 0)

    @property
    def lag(self) -> int:
        """Number of whole batches that wait to be trained."""
        return len(self._complete)

    @property
    def next_batch(self) -> WholeBatch | None:
        """The batch to train next, if it is whole."""
        return self._complete[0] if self._complete and not self.done else None

    def offsets(self) -> dict[PartitionKey, int]:
        """The next offset to read in each of this rank's partitions."""
        return {PartitionKey(BATCHES.short_name, p): self.position.batch_offsets[p] for p in self._partitions}

    def add_part(self, part: MicroBatch, partition: int, offset: int) -> None:
        """Add a part of a batch, unless the checkpoint, which may be newer than the read position, includes it."""
        if offset < self.position.batch_offsets[partition]:
            return
        self._complete.extend(self._assembly.add(part, partition, offset))

    def take_rejected(self) -> list[RejectedMicroBatch]:
        """Return the parts rejected since the last call."""
        rejected, self._assembly.rejected = self._assembly.rejected, []
        return rejected

    def train(self) -> dict[str, float]:
        """Train `next_batch`, which makes a version, and return its metrics.

        Raises ValueError if the batch cannot be trained: its version then has the weights of the one before.
        """
        self._missing_since = None
        batch = self._complete.popleft()
        rows = sum(len(part.trajectory_ids) for part in batch.parts)
        gathered = self._exchange("train the same batch", [batch.number], [*batch.next_offsets, rows])
        version = PolicyVersion(self._epoch, batch.number + 1)
        self.position = replace(
            self.position, version=version, batch_offsets=tuple(gathered[:, :-1].flatten().tolist())
        )
        if not (total_rows := int(gathered[:, -1].sum())):
            self._snapshot()
            raise ValueError(empty_reason(batch.parts))
        skipped = self._learner.skipped_updates
        try:
            values = self._learner.update(batch.parts)
        except ValueError:
            self._snapshot()
            raise
        self._check_gradient(batch, finite=self._learner.skipped_updates == skipped)
        trained = self.position.trajectories_trained + total_rows
        self.position = replace(self.position, trajectories_trained=trained)
        self._snapshot()
        return values

    def _check_gradient(self, batch: WholeBatch, *, finite: bool) -> None:
        """Raise RuntimeError after `max_skipped_batches` consecutive batches with a non-finite gradient."""
        self._nonfinite = [] if finite else [*self._nonfinite, f"{batch.number} (up to {_offsets(batch)})"]
        if finite:
            return
        log.error("batch %s has a non-finite gradient: its optimizer step is skipped", self._nonfinite[-1])
        if len(self._nonfinite) >= self._config.learner.max_skipped_batches:
            raise RuntimeError(
                f"{len(self._nonfinite)} consecutive batches have non-finite gradients: {', '.join(self._nonfinite)}. "
                "Train them again with `laminar train replay` (a smaller learning_rate, precision float32), or raise "
                "trainer.learner.max_skipped_batches"
            )

    def check(self) -> None:
        """Check, while there is nothing to train, that more batches can arrive.

        Raises RankLost if another rank has failed: all ranks then restart and rendezvous again. Raises MissingBatch if
        the next batch stays missing in the log for `missing_batch_wait_s`.
        """
        self._rendezvous.check()
        missing = self._assembly.missing()
        if missing is None:
            self._missing_since = None
            return
        if self._missing_since is None:
            self._missing_since = time.monotonic()
            log.warning("%s", missing)
        if time.monotonic() - self._missing_since >= self._config.missing_batch_wait_s:
            raise missing

    def plain_model(self) -> PreTrainedModel:
        """The policy as a plain Hugging Face model."""
        return self._learner.plain_model(self.weights)

    def _exchange(self, action: str, shared: list[int], own: list[int] | None = None) -> Tensor:
        """Gather each rank's `own`, int64[ranks, n]. Raises RuntimeError if `shared` differs between ranks."""
        gathered = torch.cat(self._rendezvous.ranks.gather(torch.tensor([[*shared, *(own or [])]])))
        if (gathered[:, : len(shared)] != gathered[0, : len(shared)]).any():
            raise RuntimeError(f"ranks do not {action}: {gathered.tolist()}")
        return gathered[:, len(shared) :]

    def _snapshot(self) -> None:
        self.weights = self._learner.weights()
        self.state = self._learner.state() if self.checkpoint_due else None


def start_rank_training(
    config: TrainingConfig,
    model: Path,
    checkpoints: StorageFolder,
    rank: int,
    epoch: int,
    shards: int,
    rendezvous_file: Path | None,
) -> RankTraining:
    """Wait for all ranks, then return the training of `rank`; every rank begins with the newest checkpoint.

    `rendezvous_file` None: the file is beside the checkpoints.
    """
    if rendezvous_file is None:
        assert isinstance(checkpoints, Path)  # an object store cannot hold the rendezvous file
        rendezvous_file = checkpoints / "ranks.json"
    ranks = Ranks(rank, config.ranks)
    rendezvous = join_process_group(rendezvous_file, ranks, config.rank_0_host, config.device_of(rank))
    return RankTraining(config, model, checkpoints, epoch, rendezvous, shards)


def _offsets(batch: WholeBatch) -> str:
    """The offset of the last part of `batch` in each partition."""
    return "offsets " + ", ".join(str(offset - 1) for offset in batch.next_offsets) + f" of {BATCHES.short_name}"
