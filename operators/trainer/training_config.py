"""The trainer's configuration: length of training, checkpoints, devices and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infra.machine import check_gpu_list, visible_gpus
from infra.setting_types import CheckedSettings, NonNegative, NonNegativeInt, Positive, PositiveInt
from infra.storage import check_storage
from operators.trainer.config import LearnerConfig
from operators.trainer.emulation import TrainerEmulation
from schemas.topics import batch_partitions


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(CheckedSettings):
    """How long training runs, its checkpoints, devices and ranks. Raises ValueError naming the invalid field."""

    learner: LearnerConfig = field(default_factory=LearnerConfig)
    optimizer_steps: PositiveInt = 80
    """Global batches to train, whatever `mini_batches` is; the last one's version is the run's final version. A batch
    that cannot be trained also counts: its version has the weights of the one before."""
    checkpoint_folder: str = ""
    """Parent of the run's checkpoint folder: a path, or a URI (s3://, gs://, abfss://, hdfs://). Empty: checkpoints are
    in the run's own folder."""
    checkpoint_every: PositiveInt = 20
    """Batches between two checkpoints."""
    checkpoints_kept: PositiveInt = 2
    """Number of newest checkpoints that are kept."""
    keep_every: NonNegativeInt = 0
    """The checkpoints after every so many batches are never removed; 0: none."""
    checkpoint_tries: PositiveInt = 5
    """Attempts to write a checkpoint or the final model before the trainer fails; pauses of 1, 2, 4, ... seconds."""
    threads: PositiveInt = 1
    """CPU threads of the model code. Weights are bit-identical only between runs with the same number of threads."""
    device: str = "cpu"
    """A torch device. With `cuda` each rank uses one of the `gpus` of its machine."""
    gpus: tuple[NonNegativeInt, ...] = ()
    """The numbers of the GPUs of a machine that the ranks use, the same on every machine; empty: all that are visible.
    With 4 of them, rank 6 uses the third one of the second machine."""
    ranks: PositiveInt = 1
    """Processes that shard the model, each with its part of every batch. `runs resume` can change them."""
    batch_shares: NonNegativeInt = 0
    """Equal shares into which every batch is divided; rank r trains the shares r, r + `ranks`, … 0: one for each rank.
    Fixed for a run: a resumed run may have any number of ranks up to this one."""
    shard_ranks: NonNegativeInt = 0
    """Consecutive ranks that hold one copy of the model between them, such as those of one machine; each further group
    holds another copy, and only gradients cross between groups. 0: all ranks hold one copy."""
    context_ranks: PositiveInt = 1
    """Consecutive ranks that train the same sequences, each a part of their tokens: for responses whose activations do
    not fit on one rank. It must divide `ranks` and the model's attention heads. A micro-batch has `micro_batch_tokens`
    for each of them."""
    rank_0_host: str = "127.0.0.1"
    """Address of rank 0's machine, to which the other ranks connect."""
    collective_timeout_s: Positive = 600.0
    """A rank that waits so long for another one within an update ends; all ranks then start again from the newest
    checkpoint. It must exceed the time by which one rank's part of a batch can take longer than another's."""
    lost_batches: tuple[NonNegativeInt, ...] = ()
    """Numbers of global batches that the log has lost: training continues without them."""
    missing_batch_wait_s: NonNegative = 60.0
    """How long an idle trainer waits for a missing batch, of which a successor is in the log, before it fails if the
    buffer has made that batch."""
    emulation: TrainerEmulation = field(default_factory=TrainerEmulation)
    """Timing of the emulated trainer, which replaces the trainer where rollouts are emulated."""

    def _check(self) -> None:
        if self.batch_shares and self.batch_shares < self.ranks:
            raise ValueError(f"batch_shares must be 0 or at least ranks ({self.ranks}), not {self.batch_shares}")
        if self.shard_ranks and self.ranks % self.shard_ranks:
            raise ValueError(f"shard_ranks must divide ranks ({self.ranks}), or be 0, not {self.shard_ranks}")
        if self.ranks % self.context_ranks:
            raise ValueError(f"context_ranks must divide ranks ({self.ranks}), not {self.context_ranks}")
        if self.learner.share_device and self.ranks > 1:
            raise ValueError(f"learner.share_device needs ranks = 1, not {self.ranks}: set learner.offload instead")
        check_gpu_list("gpus", self.gpus)
        if self.gpus and self.device != "cuda":
            raise ValueError(f"gpus needs device = 'cuda', not {self.device!r}")
        check_storage("checkpoint_folder", self.checkpoint_folder)
        if self.keep_every % self.checkpoint_every:
            every = self.checkpoint_every
            raise ValueError(f"keep_every must be a multiple of checkpoint_every ({every}), not {self.keep_every}")

    @property
    def shares(self) -> int:
        """The number of shares of a batch."""
        return self.batch_shares or self.ranks

    def partitions_of(self, rank: int, divisions: int) -> tuple[int, ...]:
        """The partitions of `batches` that `rank` reads, of a run whose batches have `divisions` parts."""
        return tuple(p for share in range(rank, self.shares, self.ranks) for p in batch_partitions(share, divisions))

    @property
    def ranks_of_a_copy(self) -> int:
        """The number of ranks that hold a copy of the model between them."""
        return self.shard_ranks or self.ranks

    def device_of(self, rank: int, visible: Sequence[str] | None = None) -> str:
        """The device of `rank` on a machine with the GPUs `visible`; by default this one."""
        if self.device != "cuda" or (self.ranks == 1 and not self.gpus):
            return self.device
        gpus = self.gpus or range(max(1, len(visible_gpus() if visible is None else visible)))
        return f"cuda:{gpus[rank % len(gpus)]}"

    @property
    def named_gpus(self) -> frozenset[int]:
        """The GPUs of a machine that the configuration names for the trainer; empty if it names none."""
        kind, _, number = self.device.partition(":")
        return frozenset([int(number)]) if kind == "cuda" and number.isdecimal() else frozenset(self.gpus)
