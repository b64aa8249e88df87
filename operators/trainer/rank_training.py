"""Trains the log of batches as one rank: the part that all ranks have in common."""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infra.kafka.role_notes import NO_NOTES, ReadNotes
from infra.machine import machine_name
from infra.models.device_copies import use_device
from infra.storage import StorageFolder
from operators.io.elements import PartitionKey
from operators.trainer.assembly import BatchAssembly, CannotTrain, RejectedMicroBatch, WholeBatch, empty_reason
from operators.trainer.checkpoint import check_mark, check_writable, find_checkpoints, remove_mark, write_mark
from operators.trainer.checkpoint_files import StoredState, TrainerPosition, on_all_ranks
from operators.trainer.config import BUILT_IN_LEARNER
from operators.trainer.joint_actions import JointActions
from operators.trainer.learner_state import LearnerState
from operators.trainer.missing_batch import MissingBatchWatch
from operators.trainer.rank_addresses import Addresses
from operators.trainer.rank_checks import check_device, check_device_memory, common_settings, fingerprint, weights_note
from operators.trainer.rank_layouts import gather_offsets, with_layout
from operators.trainer.rank_services import PROCESS, RankServices
from operators.trainer.ranks import Ranks
from operators.trainer.rendezvous import Rendezvous, join_process_group, lost_ranks, watch_ranks
from operators.trainer.training_config import TrainingConfig
from schemas.records import MicroBatch, PolicyVersion
from schemas.topics import BATCHES

T = TypeVar("T")
log = logging.getLogger(__name__)


class RankTraining:
    """Trains `model` on whole batches in order, from the newest of `checkpoints` on, as one rank of `rendezvous`.
    `divisions` is the number of parts of a batch (see BufferLayout), `dtype` the name of the data type of `weights`.
    Memory is planned for sequences of `longest` tokens. `notes` reads what other roles have committed.

    Ranks need no coordinator: a batch is whole for all ranks or for none, and each rank's actions are a function of its
    batches, so all ranks call the same collectives in the same order. Between batches rank 0 decides when the weights
    are published (`joint_actions.py`).
    """

    device: torch.device
    """The device of this rank's part of the model."""
    joint: JointActions
    """What this rank does together with the others between two batches."""

    def __init__(
        self,
        config: TrainingConfig,
        model: Path,
        checkpoints: StorageFolder,
        epoch: int,
        rendezvous: Rendezvous | None = None,
        divisions: int = 1,
        dtype: str = "float32",
        longest: int = 0,
        notes: ReadNotes = NO_NOTES,
    ) -> None:
        self._config, self.rendezvous = config, rendezvous or Rendezvous()
        ranks = self.ranks = self.rendezvous.ranks
        noted = torch.tensor([[epoch, zlib.crc32(machine_name().encode())]])
        epochs, machines = torch.cat(ranks.gather(noted)).T.tolist()
        epoch = self.epoch = epochs[0]  # a version is the same on all ranks
        device = config.device_of(ranks.rank)
        self.device = torch.device(device)
        use_device(device)
        if config.learner.name == BUILT_IN_LEARNER:
            check_device_memory(model, config, device, machines.count(machines[ranks.rank]), longest)
        self._partitions = config.partitions_of(ranks.rank, divisions)
        self.position = TrainerPosition(PolicyVersion(epoch, 0), (0,) * config.shares * divisions, 0)
        self.resumed_from: PolicyVersion | None = None
        if ranks.count > 1:
            self._check_folder(checkpoints)
        with watch_ranks(self.rendezvous, self.device):
            self._open(model, device, dtype)
            self._resume(checkpoints, divisions)
        self.position = with_layout(self.position, config)
        self._assembly = BatchAssembly(
            self._partitions,
            divisions=divisions,
            first=self.position.version.number,
            lost=config.lost_batches,
            starts=[self.position.batch_offsets[partition] for partition in self._partitions],
        )
        self._complete: deque[WholeBatch] = deque(self._assembly.take())
        self._missing = MissingBatchWatch(self._assembly, config.missing_batch_wait_s, notes)
        self._nonfinite: list[str] = []
        """The consecutive last batches whose gradient was not finite."""

    def _check_folder(self, checkpoints: StorageFolder) -> None:
        """Raise CheckpointError on every rank unless all have the same folder of checkpoints."""
        first, what = self.ranks.rank == 0, f"checkpoints in {checkpoints}"
        self._on_all_ranks(partial(write_mark, checkpoints, self.epoch) if first else lambda: None, what)
        try:
            self._on_all_ranks(partial(check_mark, checkpoints, self.epoch), what)
        finally:
            if first:
                self._persist(partial(remove_mark, checkpoints, self.epoch))

    def _open(self, model: Path, device: str, dtype: str) -> None:
        """Open the learner. Raises CannotTrain for a model or settings that it refuses."""
        try:
            services = self.rendezvous.services
            self._learner = services.open_learner(self._config.learner, model, device, self.ranks)
        except ValueError as error:  # each start would raise it again
            raise CannotTrain(f"the trainer cannot start: {error}") from error
        rounded, full = self._learner.weights(getattr(torch, dtype)), self._learner.weights()
        self.joint = JointActions(self.rendezvous, self.device, rounded, full)
        self.before_change(self.joint.wait_until_written)

    def _resume(self, checkpoints: StorageFolder, divisions: int) -> None:
        """Continue from the newest of `checkpoints`, if there is one. Raises as `_restore`."""
        found = self._persist(lambda: find_checkpoints(checkpoints))
        newest = PolicyVersion.parse(found[-1].name) if found else PolicyVersion(0, 0)
        self._exchange("begin with the same checkpoint (all need the same folder)", [newest.epoch, newest.number])
        if not found:
            return
        self.position = self._restore(found[-1])
        shares = self._config.shares
        if (count := len(self.position.batch_offsets)) != shares * divisions:
            raise CannotTrain(
                f"checkpoint {found[-1]} is of a run with {count} partitions of batches, but trainer.batch_shares (or "
                f"trainer.ranks) = {shares} and experience.max_shards (or shards) = {divisions} make "
                f"{shares * divisions}: both are fixed for a run. Set trainer.batch_shares = {count // divisions}; "
                "trainer.ranks can be any number up to it"
            )
        self.resumed_from = self.position.version
        log.info("resumed from checkpoint %s as epoch %d", self.resumed_from, self.epoch)

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
        self._missing.reset()
        self.joint.before_training()
        batch = self._complete.popleft()
        rows = sum(len(part.trajectory_ids) for part in batch.parts)
        gathered = self._exchange("train the same batch", [batch.number], [rows])
        version = PolicyVersion(self.epoch, batch.number + 1)
        offsets = gather_offsets(self.ranks, self._partitions, batch.next_offsets)
        self.position = replace(self.position, version=version, batch_offsets=offsets)
        if not (total_rows := int(gathered.sum())):
            raise ValueError(empty_reason(batch.parts))
        skipped = self._learner.skipped_updates
        with watch_ranks(self.rendezvous, self.device):
            values = self._learner.update(batch.parts)
        self._check_gradient(batch, finite=self._learner.skipped_updates == skipped)
        trained = self.position.trajectories_trained + total_rows
        self.position = replace(self.position, trajectories_trained=trained)
        return values

    def _check_gradient(self, batch: WholeBatch, *, finite: bool) -> None:
        """Raise CannotTrain after `max_skipped_batches` consecutive batches with a non-finite loss or gradient."""
        self._nonfinite = (
            [] if finite else [*self._nonfinite, f"{batch.number} (up to {_offsets(batch, self._partitions)})"]
        )
        if finite:
            return
        log.error("batch %s has a non-finite loss or gradient: optimizer steps of it are skipped", self._nonfinite[-1])
        if len(self._nonfinite) >= self._config.learner.max_skipped_batches:
            raise CannotTrain(
                f"{len(self._nonfinite)} consecutive batches have a non-finite loss or gradient: "
                f"{', '.join(self._nonfinite)}. Train them again with `laminar train replay` (a smaller "
                "learning_rate, precision float32), or raise trainer.learner.max_skipped_batches and "
                "resume the run"
            )

    def check(self) -> None:
        """Check, while there is nothing to train, that more batches can arrive.

        Raises RankLost if another rank has failed: all ranks then restart and rendezvous again. Raises MissingBatch if
        the next batch stays missing in the log for `missing_batch_wait_s`, although the buffer has made it.
        """
        self.rendezvous.check()
        self.joint.while_idle()
        self._missing.check(self.rendezvous.services.system.monotonic())

    def state(self) -> LearnerState:
        """The learner's state: this rank's part."""
        return self._learner.state()

    def before_change(self, wait: Callable[[], None]) -> None:
        """Call `wait`, too, before weights and moments change."""
        before = self._learner.before_change

        def wait_for_both() -> None:
            before()
            wait()

        self._learner.before_change = wait_for_both

    @property
    def model(self) -> PreTrainedModel:
        """The policy, of which this rank has a part."""
        return self._learner.model

    def _restore(self, folder: StorageFolder) -> TrainerPosition:
        """Restore the checkpoint in `folder`.

        Raises CheckpointError on every rank if its files are damaged, CannotTrain if it is of another model.
        """
        with self._persist(lambda: StoredState(folder)) as stored:
            self._on_all_ranks(lambda: stored.verify(self.ranks), f"the checkpoint {folder}")
            try:
                self._persist(lambda: self._learner.restore(stored))
            except ValueError as error:
                raise CannotTrain(f"checkpoint {folder} cannot be resumed from: {error}") from error
            return stored.position

    def _persist(self, action: Callable[[], T]) -> T:
        return self.rendezvous.services.persist(action, self._config.checkpoint_tries)

    def _on_all_ranks(self, action: Callable[[], None], what: str) -> None:
        on_all_ranks(self.ranks, lambda: self._persist(action), what)

    def _exchange(self, action: str, shared: list[int], own: list[int] | None = None) -> Tensor:
        """Gather each rank's `own`, int64[ranks, n]. Raises RuntimeError if `shared` differs between ranks."""
        gathered = torch.cat(self.rendezvous.ranks.gather(torch.tensor([[*shared, *(own or [])]])))
        if (gathered[:, : len(shared)] != gathered[0, : len(shared)]).any():
            raise RuntimeError(f"ranks do not {action}: {gathered.tolist()}")
        return gathered[:, len(shared) :]


def start_rank_training(
    config: TrainingConfig,
    model: Path,
    checkpoints: StorageFolder,
    rank: int,
    epoch: int,
    divisions: int,
    addresses: Addresses,
    notes: ReadNotes,
    dtype: str = "float32",
    longest: int = 0,
    services: RankServices = PROCESS,
) -> RankTraining:
    """Wait for all ranks, which find rank 0 by `addresses`, then return the training of `rank`; every rank begins with
    the newest checkpoint.

    Raises CannotTrain, before the rendezvous, if this machine does not have the model or the device, CheckpointError if
    it cannot write to `checkpoints`.
    """
    ranks = Ranks.of(config, rank)
    check_device(config.device_of(rank))
    services.persist(lambda: check_writable(checkpoints, rank), config.checkpoint_tries)
    rendezvous = join_process_group(
        addresses,
        ranks,
        config.rank_0_host,
        config.device_of(rank),
        fingerprint(model, rank) if ranks.count > 1 else "",
        common_settings(config, divisions, dtype),
        services,
        epoch,
        weights_note(model) if ranks.count > 1 else "",
    )
    with lost_ranks():
        return RankTraining(config, model, checkpoints, epoch, rendezvous, divisions, dtype, longest, notes)


def _offsets(batch: WholeBatch, partitions: Sequence[int]) -> str:
    """The offset of the last part of `batch` in each of this rank's `partitions`."""
    last = zip(partitions, batch.next_offsets, strict=True)
    return f"{BATCHES.short_name} " + ", ".join(f"partition {number} offset {offset - 1}" for number, offset in last)
