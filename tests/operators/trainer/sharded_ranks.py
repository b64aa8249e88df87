"""Ranks, each a process, that train a model, publish it, write a checkpoint and resume; each writes what it measured.

    python sharded_ranks.py FOLDER NAME RANKS

FOLDER has the model; rank R writes FOLDER/NAME-R.json, and the checkpoint is under FOLDER/NAME. Peaks are of
resident anonymous memory in bytes, beyond that of the process without a model.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[3]), str(HERE.parents[2])]

from trainer_batches import make_batch  # noqa: E402

from infra.models.checkpoint_list import list_checkpoints  # noqa: E402
from infra.models.weights import WeightsDigest  # noqa: E402
from operators.trainer.checkpoint_files import StoredState  # noqa: E402
from operators.trainer.checkpoint_writer import CheckpointWriter  # noqa: E402
from operators.trainer.config import LearnerConfig  # noqa: E402
from operators.trainer.learner import Learner  # noqa: E402
from operators.trainer.rank_training import RankTraining  # noqa: E402
from operators.trainer.ranks import Ranks, full_tensor  # noqa: E402
from operators.trainer.rendezvous import Rendezvous, join_process_group  # noqa: E402
from operators.trainer.training_config import TrainingConfig  # noqa: E402

LEARNER = LearnerConfig(warmup_steps=0, micro_batch_tokens=64, gradient_checkpointing=True)


class Memory:
    """Peaks of this process's anonymous memory."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._before = _status("RssAnon")

    def peak(self, name: str, work: Callable[..., Any], *args: object) -> Any:
        """Do `work` and record its peak as `name`."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak restarts at the present size
        result = work(*args)
        # The peak has no other measure; libraries' pages, of which a fork maps more and more, are left out.
        self.peaks[name] = _status("VmHWM") - _status("RssFile") - _status("RssShmem") - self._before
        return result


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The digest of full tensors."""
    found = WeightsDigest()
    for _ in found.added((name, full_tensor(tensor)) for name, tensor in tensors):
        pass
    return found.hexdigest()


def run(folder: Path, name: str, rendezvous: Rendezvous) -> dict[str, object]:
    """Train as one of `rendezvous`, and return what was measured."""
    ranks, checkpoints = rendezvous.ranks, folder / name
    config = TrainingConfig(ranks=ranks.count, checkpoint_every=1, learner=LEARNER)

    def start() -> RankTraining:
        epoch = 0 if ranks.rank else 1  # as in a run: rank 0's counts
        return RankTraining(config, folder / "model", checkpoints, epoch, rendezvous)

    def train(training: RankTraining, number: int) -> None:
        part = make_batch(seed=number, number=number, groups=2, parts=ranks.count)[ranks.rank]
        training.add_part(replace(part, index=0, count=1, rank=ranks.rank), ranks.rank, number)
        training.train()

    def publish(training: RankTraining) -> str:
        training.join_after_training()
        return digest(training.weights.items()) if ranks.rank == 0 else ""

    def checkpoint(training: RankTraining) -> None:
        writer = CheckpointWriter(config, training, checkpoints)
        writer.begin()
        writer.finish()
        writer.close()

    memory = Memory()
    training = memory.peak("construction", start)
    initial = digest(training.state().weights.items())
    memory.peak("update", train, training, 0)
    published = memory.peak("publication", publish, training)
    again = publish_while_idle(training)
    memory.peak("checkpoint", checkpoint, training)
    ranks.maximum(0)  # rank 0 has completed the checkpoint
    saved = digest(training.state().tensors().items())
    del training
    gc.collect()
    resumed = memory.peak("resume", start)
    restored = digest(resumed.state().tensors().items())
    return {
        "peaks": memory.peaks,
        "initial": initial,
        "published": published,
        "published_again": again,
        "saved": saved,
        "restored": restored,
        "files": sorted(file.name for file in list_checkpoints(checkpoints)[-1].iterdir()),  # type: ignore[union-attr]
    }


def publish_while_idle(training: RankTraining) -> list[str]:
    """The digests of two gatherings that rank 0 begins: while the others are idle, and while they have a batch."""
    digests = []
    for number in range(2):
        if training.ranks.rank == 0:
            digests.append(digest(training.weights.items()))
        while training.ranks.rank and training._joint._joined < 2 + number:
            if number == 0:
                training.check()
            else:
                training._joint.before_training()
    if training.ranks.rank == 0:
        training._joint.before_training()
    return digests


def reshard(folder: Path, name: str, rendezvous: Rendezvous) -> dict[str, object]:
    """Restore the checkpoint of the run `name`, which another number of ranks wrote."""
    learner = Learner(LEARNER, folder / "model", ranks=rendezvous.ranks)
    with StoredState(list_checkpoints(folder / name)[-1]) as stored:
        stored.verify(rendezvous.ranks)
        learner.restore(stored)
    return {"restored": digest(learner.state().tensors().items())}


def run_rank(folder: Path, name: str, ranks: Ranks, of: str | None) -> None:
    """Run as one of `ranks`."""
    torch.set_num_threads(1)
    rendezvous = join_process_group(folder / f"{name}.ranks.json", ranks)
    found = run(folder, name, rendezvous) if of is None else reshard(folder, of, rendezvous)
    (folder / f"{name}-{ranks.rank}.json").write_text(json.dumps(found))
    if ranks.count > 1:
        dist.barrier()
        dist.destroy_process_group()


def main(folder: Path, name: str, count: int, of: str | None = None) -> int:
    """Fork the ranks; return 0 if all succeed."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(folder, name, Ranks(rank, count), of)) for rank in range(count)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return int(any(each.exitcode for each in ranks))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:]))
