"""Ranks that write something together, which is slow or fails.

    python write_together.py FOLDER WORK...

WORK is `slow`: two ranks of one machine and one of another, which is slow, write the file of a version;
`background`: a rank of another machine, which is slow, sends its part of two versions while both ranks train, once rank
0 needs it; or `full=N`: two ranks gather the final model of FOLDER/model into FOLDER/WORK/result, whose disk is full in
the first N attempts. Rank R writes FOLDER/WORK/R.json: the values of the file; seconds of calls and differing tensors;
or the error and the attempts of rank 0's final model.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[3]), str(HERE.parents[2])]

from forked_ranks import fork_ranks  # noqa: E402
from trainer_batches import make_batch  # noqa: E402

from operators.trainer import joint_actions, persist, version_file  # noqa: E402
from operators.trainer.config import LearnerConfig  # noqa: E402
from operators.trainer.persist import CheckpointError  # noqa: E402
from operators.trainer.rank_addresses import AddressFile  # noqa: E402
from operators.trainer.rank_services import RankServices  # noqa: E402
from operators.trainer.rank_training import RankTraining  # noqa: E402
from operators.trainer.ranks import Ranks  # noqa: E402
from operators.trainer.rendezvous import join_process_group  # noqa: E402
from operators.trainer.train_batches import FinalModel  # noqa: E402
from operators.trainer.training_config import TrainingConfig  # noqa: E402
from operators.trainer.version_file import ranks_without_file, write_parts  # noqa: E402
from operators.trainer.weight_parts import NamedRange, WeightPart  # noqa: E402

TENSORS, SLOW_S, TIMEOUT_S = 26, 0.5, 12.0
"""All tensors of the slow rank take longer than the timeout, a few of them much less."""
TRIES = 3
MESSAGE_BYTES, SHORT_TIMEOUT_S = 2048, 8.0
"""All messages of a version take longer than the timeout."""


class SlowWeights:
    """Tensors with an element of each rank, its number. The last rank has each one late."""

    at_hand = True

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def specs(self) -> dict[str, torch.Tensor]:
        return {f"t{number}": torch.empty(self._ranks.count, device="meta") for number in range(TENSORS)}

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError

    def parts(self) -> Iterator[WeightPart]:
        rank, count = self._ranks.rank, self._ranks.count
        for name in self.specs():
            if rank == count - 1:
                time.sleep(SLOW_S)
            yield WeightPart((NamedRange(name, 0, count),), rank, torch.tensor([float(rank)]), torch.float32)


def write_slowly(rank: int, folder: Path) -> object:
    """Write the file; its values in it on rank 0."""
    version_file._TOGETHER_BYTES = 1
    ranks = join_process_group(AddressFile(folder / "ranks.json"), Ranks(rank, 3, timeout_s=TIMEOUT_S)).ranks
    weights = SlowWeights(ranks)
    values = np.zeros((TENSORS, 3), np.float32)
    views = {name: values[number].view(np.uint8) for number, name in enumerate(weights.specs())}

    def write(part: WeightPart) -> None:
        if rank == 0:
            part.write(views)  # rank 1's own element is as good as written

    own = None if rank == 2 else write
    write_parts(weights, ranks, own, ranks_without_file(ranks, own))
    return values.tolist()


class SlowSender:
    """Sends each message late, those of version `number` once rank 0 waits for them: its file in `folder` says so."""

    def __init__(self, folder: Path) -> None:
        self._send, self._folder, self.number = version_file._send, folder, 0

    def __call__(self, step: Any, group: Any) -> None:
        while not (self._folder / f"{self.number}.awaited").exists():
            time.sleep(0.01)
        time.sleep(SLOW_S)
        self._send(step, group)


def publish_in_background(rank: int, folder: Path) -> object:
    """Publish the initial model and that of the first batch. On rank 0 the seconds of the wait for the first version
    and of the second batch's step for the second one, and how many of the tensors are wrong."""
    version_file.GROUP_BYTES = MESSAGE_BYTES
    if rank:
        joint_actions.open_file = lambda *_: nullcontext()  # type: ignore[assignment, return-value]
        version_file._send = sender = SlowSender(folder)
    ranks = Ranks(rank, 2, timeout_s=SHORT_TIMEOUT_S)
    rendezvous = join_process_group(AddressFile(folder / "ranks.json"), ranks)
    config = TrainingConfig(ranks=2, learner=LearnerConfig(warmup_steps=0, micro_batch_tokens=64))
    training = RankTraining(config, folder.parent / "model", folder / "checkpoints", 1, rendezvous)
    for number in range(2):
        part = make_batch(seed=number, number=number, parts=2)[rank]
        training.add_part(replace(part, index=0, count=1, rank=rank), rank, number)
    (folder / f"{rank}.version").touch()
    wait, number = training._learner.before_change, 0

    def reach_step() -> None:
        if rank == 0:
            (folder / f"{number}.awaited").touch()
        wait()

    training._learner.before_change = reach_step
    seconds, wrong = list[float](), 0
    for number in range(2):
        expected = {name: tensor.clone() for name, tensor in training.joint.rounded.items()}
        values = {name: np.zeros(tensor.nbytes, np.uint8) for name, tensor in expected.items()}
        began = time.monotonic()
        finish = training.joint.write_to(folder / "0.version", values) if rank == 0 else None
        if rank:
            sender.number = number
        if finish is not None and number == 0:
            (folder / "0.awaited").touch()
            finish()
            seconds.append(time.monotonic() - began)
        training.train()
        if finish is not None:
            finish()
            wrong += sum(values[name].tobytes() != each.numpy().tobytes() for name, each in expected.items())
    return [*seconds, training.joint.take_waited(), wrong]


class FullDisk(RankServices):
    """A disk that is full at the second tensor of the first `attempts` models."""

    def __init__(self, attempts: int) -> None:
        self.attempts = attempts

    def write_model(self, model: Any, source: Path, specs: Any, tensors: Any, folder: Path) -> None:
        super().write_model(model, source, specs, self._written(tensors), folder)

    def _written(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        self.attempts -= 1
        for number, each in enumerate(tensors):
            if number == 1 and self.attempts >= 0:
                raise OSError(28, "No space left on device")
            yield each


def write_model(rank: int, folder: Path, full: int) -> object:
    """Write the final model; rank 0's error, and how often the ranks have gathered it."""
    persist.PAUSE_S = 0.0
    ranks = Ranks(rank, 2, timeout_s=TIMEOUT_S)
    rendezvous = join_process_group(AddressFile(folder / "ranks.json"), ranks, services=FullDisk(full))
    model = folder.parent / "model"
    training = RankTraining(TrainingConfig(ranks=2), model, folder / "checkpoints", 1, rendezvous)
    error = ""
    if rank == 0:
        try:
            FinalModel(training, model, folder / "result", TRIES).write()
        except CheckpointError as failed:
            error = str(failed)
    while training.joint._taken < min(full + 1, TRIES):
        training.check()
    ranks.maximum(0)  # they are in step
    return [error, training.joint._taken]


def be(rank: int, folder: Path, work: str) -> None:
    """Do `work` as rank `rank`."""
    torch.set_num_threads(1)
    works = {"slow": write_slowly, "background": publish_in_background}
    found = works[work](rank, folder) if work in works else write_model(rank, folder, int(work.partition("=")[2]))
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path, *works: str) -> None:
    """Fork the ranks of one work after the other; those of `slow`, which mostly wait, beside the others."""
    beside = list[BaseProcess]()
    for work in works:
        (folder / work).mkdir()
        if work == "slow":
            beside.append(
                multiprocessing.get_context("fork").Process(target=fork_ranks, args=(be, 3, folder / work, work))
            )
            beside[-1].start()
        else:
            fork_ranks(be, 2, folder / work, work)
    for each in beside:
        each.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
