"""Trains a run that is killed repeatedly between the optimizer steps of a batch, and one that is not killed.

    python killed_between_steps.py FOLDER JOBS

FOLDER has a model; JOBS is a JSON list of the name of a folder, a TrainingConfig, and numbers of optimizer steps. For
each number a process trains from the newest checkpoint on and kills itself with SIGKILL after so many steps (0: it
trains to the end); the last process writes a digest of its state. All are forked from one process that has never run a
backward pass.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import torch

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[3]), str(HERE.parents[2])]

from pydantic import TypeAdapter  # noqa: E402
from trainer_batches import make_batch  # noqa: E402

from infra.models.checkpoint_list import list_checkpoints  # noqa: E402
from operators.trainer.checkpoint import write_checkpoint  # noqa: E402
from operators.trainer.rank_training import RankTraining  # noqa: E402
from operators.trainer.trained_model import TrainedModel  # noqa: E402
from operators.trainer.training_config import TrainingConfig  # noqa: E402


def train(folder: Path, config: TrainingConfig, epoch: int, kill_after: int) -> None:
    """Train to the end, or until `kill_after` optimizer steps."""
    torch.set_num_threads(1)
    step, taken = TrainedModel.step, 0

    def counting_step(trained: TrainedModel, rate: float, *, finite: bool) -> float:
        nonlocal taken
        norm = step(trained, rate, finite=finite)
        taken += 1
        if taken == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return norm

    TrainedModel.step = counting_step  # type: ignore[method-assign]
    checkpoints = folder / "checkpoints"
    training = RankTraining(config, folder.parent / "model", checkpoints, epoch)
    for number in range(config.optimizer_steps):
        (part,) = make_batch(number, groups=2, samples=2, number=number, longest=8)
        training.add_part(part, 0, number)
    while training.next_batch is not None:
        training.train()
        if training.checkpoint_due:
            write_checkpoint(checkpoints, training.state(), training.position)
    digest = hashlib.sha256()
    state = asdict(training.state())
    for kind in ("weights", "moments", "critic_weights", "critic_moments"):
        for name, tensor in sorted(state[kind].items()):
            digest.update(f"{kind} {name}".encode() + tensor.contiguous().numpy().tobytes())
    digest.update(str((state["updates"], state["skipped_updates"])).encode())
    (folder / "digest").write_text(digest.hexdigest())


def main(folder: Path, config: TrainingConfig, kills: list[int]) -> int:
    """Fork one process after another; return 0 if each ended as expected."""
    context = multiprocessing.get_context("fork")
    for epoch, kill_after in enumerate(kills, 1):
        before = [each.name for each in list_checkpoints(folder / "checkpoints")]
        process = context.Process(target=train, args=(folder, config, epoch, kill_after))
        process.start()
        process.join()
        print(f"epoch {epoch} began with {before} and ended with {process.exitcode}")
        if process.exitcode != (-signal.SIGKILL if kill_after else 0):
            return 1
    return 0


if __name__ == "__main__":
    for name, settings, numbers in json.loads(sys.argv[2]):
        (where := Path(sys.argv[1]) / name).mkdir()
        if main(where, TypeAdapter(TrainingConfig).validate_python(settings), numbers):
            sys.exit(1)
