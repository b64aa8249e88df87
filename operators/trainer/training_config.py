"""How long training goes on, and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

from infra.storage import open_storage
from operators.trainer.config import LearnerConfig
from operators.trainer.emulation import TrainerEmulation


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Raises ValueError naming the field that does not fit."""

    learner: LearnerConfig = field(default_factory=LearnerConfig)
    optimizer_steps: int = 80
    """Global batches to train; the last one's version is the run's final version. One that cannot be trained counts,
    too: its version has the weights of the one before."""
    checkpoint_folder: str = ""
    """Where checkpoints go, in a folder named as the run is: a path, or a URI (s3://, gs://, abfss://, hdfs://). Empty:
    into the run's own folder."""
    checkpoint_every: int = 20
    """Optimizer steps between two checkpoints."""
    checkpoints_kept: int = 2
    """The newest so many stay."""
    keep_every: int = 0
    """Checkpoints whose optimizer step is a multiple of this stay for good; 0: none does."""
    checkpoint_tries: int = 5
    """How often a checkpoint, or the final model, is tried to be written, after pauses of 1, 2, 4, ... seconds, before
    the trainer ends with an error."""
    threads: int = 1
    """CPU threads of the model code. Weights are bit-identical only between runs with the same number."""
    device: str = "cpu"
    """`cuda`: of several ranks each takes the next device."""
    ranks: int = 1
    """Processes that hold the model together, each with its part of every batch. Fixed for a run."""
    rank_0_host: str = "127.0.0.1"
    """Address of the machine of rank 0, where the others find it."""
    lost_batches: tuple[int, ...] = ()
    """Numbers of global batches that the log has lost: training goes on without them."""
    missing_batch_wait_s: float = 60.0
    """How long the trainer waits, with nothing to train, for a batch whose successor is in the log; then it stops."""
    emulation: TrainerEmulation = field(default_factory=TrainerEmulation)
    """What stands for the trainer where rollouts are emulated."""

    def __post_init__(self) -> None:
        for name in ("optimizer_steps", "checkpoint_every", "checkpoints_kept", "checkpoint_tries", "threads", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        open_storage(self.checkpoint_folder)
        if any(number < 0 for number in self.lost_batches):
            raise ValueError(f"lost_batches must be numbers of batches, from 0 on, not {list(self.lost_batches)}")
        if not self.missing_batch_wait_s >= 0:
            raise ValueError(f"missing_batch_wait_s must not be negative, not {self.missing_batch_wait_s}")
        if self.keep_every < 0 or self.keep_every % self.checkpoint_every:
            every = self.checkpoint_every
            raise ValueError(f"keep_every must be a multiple of checkpoint_every ({every}), not {self.keep_every}")
        if self.ranks > 1 and self.learner.lora.rank:
            raise ValueError(
                f"ranks must be 1 with lora.rank, not {self.ranks}: adapters are trained by one rank alone"
            )

    def device_of(self, rank: int) -> str:
        """The device of `rank`."""
        return f"cuda:{rank}" if self.device == "cuda" and self.ranks > 1 else self.device
