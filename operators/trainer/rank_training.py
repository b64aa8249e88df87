"""One rank's way through the log of batches: what every rank does alike, whichever of them publishes."""

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
from operators.trainer.assembly import BatchAssembly, RejectedMicroBatch, WholeBatch
from operators.trainer.checkpoint import TrainerPosition, list_checkpoints, read_checkpoint
from operators.trainer.learner import Learner, LearnerState
from operators.trainer.rendezvous import Rendezvous
from operators.trainer.training_config import TrainingConfig
from schemas.records import MicroBatch, PolicyVersion
from schemas.topics import BATCHES, batch_partitions

log = logging.getLogger(__name__)


class RankTraining:
    """Trains whole batches of `model` in their order, from the newest of `checkpoints` on, as one rank of `meeting`.
    `shards` of the buffer make them.

    Ranks are told nothing: batches are whole for all of them or for none, and what each does is a function of its
    batches, so that all ask for the same exchanges in the same order.
    """

    weights: Mapping[str, Tensor]
    """The policy's after the last update, whole."""
    state: LearnerState | None
    """All of the learner's after the last update, whole, where a checkpoint is due; else None."""

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
        self._whole: deque[WholeBatch] = deque(self._assembly.take())
        self._missing_since: float | None = None
        self._skipped: list[str] = []
        """The last batches, as many as come one after the other, whose gradient was not finite."""
        began = self.resumed_from or PolicyVersion(0, 0)
        self._agree("begin with one checkpoint", [began.epoch, began.number])
        self._look()

    @property
    def trained(self) -> int:
        """Batches that made a version: each does, so this is the number of the next one."""
        return self.position.version.number

    @property
    def done(self) -> bool:
        """Whether there is nothing more to learn."""
        return self.trained >= self._config.optimizer_steps

    @property
    def due(self) -> bool:
        """Whether the version at hand is one of which there is to be a checkpoint."""
        return self.trained > 0 and (self.done or self.trained % self._config.checkpoint_every == 0)

    @property
    def lag(self) -> int:
        """Whole batches that have come and wait."""
        return len(self._whole)

    @property
    def waiting(self) -> WholeBatch | None:
        """The batch to train next, once it is whole."""
        return self._whole[0] if self._whole and not self.done else None

    def offsets(self) -> dict[PartitionKey, int]:
        """Where reading stands in this rank's partitions."""
        return {PartitionKey(BATCHES.short_name, p): self.position.batch_offsets[p] for p in self._partitions}

    def take(self, part: MicroBatch, partition: int, offset: int) -> None:
        """Take a part of a batch, unless it was taken: the checkpoint may be newer than where reading began."""
        if offset < self.position.batch_offsets[partition]:
            return
        self._whole.extend(self._assembly.add(part, partition, offset))

    def rejected(self) -> list[RejectedMicroBatch]:
        """The parts that were not accepted since this was asked last."""
        rejected, self._assembly.rejected = self._assembly.rejected, []
        return rejected

    def train(self) -> dict[str, float]:
        """Train the batch that waits; it makes a version.

        Raises ValueError for one of which nothing can be trained: its version has the weights of the one before.
        """
        self._missing_since = None
        batch = self._whole.popleft()
        rows = sum(len(part.trajectory_ids) for part in batch.parts)
        told = self._agree("train one batch", [batch.number], [*batch.next_offsets, rows])
        version = PolicyVersion(self._epoch, batch.number + 1)
        self.position = replace(self.position, version=version, batch_offsets=tuple(told[:, :-1].flatten().tolist()))
        if not (everyone := int(told[:, -1].sum())):
            self._look()
            raise ValueError("it has no trajectory" if batch.parts else "the log has lost it")
        skipped = self._learner.skipped_updates
        try:
            values = self._learner.update(batch.parts)
        except ValueError:
            self._look()
            raise
        self._note_gradient(batch, finite=self._learner.skipped_updates == skipped)
        trained = self.position.trajectories_trained + everyone
        self.position = replace(self.position, trajectories_trained=trained)
        self._look()
        return values

    def _note_gradient(self, batch: WholeBatch, *, finite: bool) -> None:
        """Raise RuntimeError after `max_skipped_batches` in a row whose gradients are not finite."""
        self._skipped = [] if finite else [*self._skipped, f"{batch.number} (up to {_offsets(batch)})"]
        if finite:
            return
        log.error("batch %s has a gradient that is not finite: that optimizer step is skipped", self._skipped[-1])
        if len(self._skipped) >= self._config.learner.max_skipped_batches:
            raise RuntimeError(
                f"the gradients of {len(self._skipped)} batches in a row are not finite: {', '.join(self._skipped)}. "
                "Train them again with `laminar train replay` (a smaller learning_rate, precision float32), or set "
                "trainer.learner.max_skipped_batches"
            )

    def check(self) -> None:
        """See to it, where there is nothing to train, that there will be.

        Raises RankLost where another rank is gone: its next process meets with others in the place of all. Raises
        MissingBatch where the next batch is missing in the log.
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
        """The policy as anyone may load it."""
        return self._learner.plain_model(self.weights)

    def _agree(self, what: str, alike: list[int], own: list[int] | None = None) -> Tensor:
        """What each rank says of its `own`, int64[ranks, n]. Raises RuntimeError where `alike` is not so everywhere."""
        told = torch.cat(self._rendezvous.ranks.gather(torch.tensor([[*alike, *(own or [])]])))
        if (told[:, : len(alike)] != told[0, : len(alike)]).any():
            raise RuntimeError(f"ranks do not {what}: {told.tolist()}")
        return told[:, len(alike) :]

    def _look(self) -> None:
        self.weights = self._learner.weights()
        self.state = self._learner.state() if self.due else None


def _offsets(batch: WholeBatch) -> str:
    """The last offset of each partition that has a part of `batch`."""
    return "offsets " + ", ".join(str(offset - 1) for offset in batch.next_offsets) + f" of {BATCHES.short_name}"
