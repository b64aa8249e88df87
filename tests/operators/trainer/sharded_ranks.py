"""Ranks, each a process, that train a model, publish it, write a checkpoint and resume; each writes what it measured.

    python sharded_ranks.py FOLDER NAME:RANKS[:WORK]...

FOLDER has the model; rank R writes FOLDER/NAME-R.json, and the checkpoint is under FOLDER/NAME. WORK is empty for the
whole cycle, one of `MODELS` for construction and update with other settings, or the NAME of a run whose checkpoint the
ranks only restore. Peaks are of resident anonymous memory in bytes, beyond that of the process without a model. All
ranks are forked from one process, so that torch and transformers are imported once.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[3]), str(HERE.parents[2])]

from forked_ranks import fork_ranks  # noqa: E402
from trainer_batches import make_batch  # noqa: E402

from infra.models.checkpoint_list import list_checkpoints  # noqa: E402
from infra.models.weights import WeightsDigest, mapped_tensors  # noqa: E402
from infra.store.incoming_version import VersionMemory  # noqa: E402
from infra.store.names import SHARED_MEMORY  # noqa: E402
from operators.trainer import joint_actions, version_file  # noqa: E402
from operators.trainer.checkpoint_files import StoredState  # noqa: E402
from operators.trainer.checkpoint_writer import CheckpointWriter  # noqa: E402
from operators.trainer.clean_stop import keep_newest, keep_with_rank_0  # noqa: E402
from operators.trainer.config import AlgorithmConfig, LearnerConfig, LoraConfig  # noqa: E402
from operators.trainer.joint_actions import RanksStop  # noqa: E402
from operators.trainer.learner import Learner  # noqa: E402
from operators.trainer.rank_addresses import AddressFile  # noqa: E402
from operators.trainer.rank_training import RankTraining  # noqa: E402
from operators.trainer.ranks import Ranks, full_tensor  # noqa: E402
from operators.trainer.rendezvous import Rendezvous, join_process_group  # noqa: E402
from operators.trainer.training_config import TrainingConfig  # noqa: E402
from operators.trainer.version_file import layout_of  # noqa: E402

LEARNER = LearnerConfig(warmup_steps=0, micro_batch_tokens=64, gradient_checkpointing=True)
_PENALTY = AlgorithmConfig(kl_coefficient=0.1)
MODELS = {
    "float32": LEARNER,
    "bfloat16": replace(LEARNER, precision="bfloat16", logits_chunk_tokens=16),
    "critic": replace(LEARNER, algorithm=replace(_PENALTY, name="ppo"), mini_batches=1),
}
"""The same settings for another model, settings with other numbers, or with further models: a critic and a reference;
adapters, if peft is installed, and a reference."""
if find_spec("peft") is not None:
    MODELS["adapters"] = replace(LEARNER, algorithm=_PENALTY, lora=LoraConfig(rank=8))


class Memory:
    """Peaks of this process's anonymous memory by phase, and what they are at least if it held the whole weights."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.of_whole: dict[str, int] = {}
        self._before = _status("RssAnon")

    def peak(self, name: str, work: Callable[..., Any], *args: Any) -> Any:
        """Do `work`, whose first argument is a training or which starts one, and record its peak as `name`."""
        result = self._measured(self.peaks, name, work, *args)
        others = other_parts if name != "update" else other_parts_and_gradients
        self._measured(self.of_whole, name, others, args[0] if args else result)
        return result

    def _measured(self, peaks: dict[str, int], name: str, work: Callable[..., Any], *args: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # the peak restarts at the present size
        result = work(*args)
        # The peak has no other measure; libraries' pages, of which a fork maps more and more, are left out.
        peaks[name] = _status("VmHWM") - _status("RssFile") - _status("RssShmem") - self._before
        return result


def other_parts(training: RankTraining) -> list[Tensor]:
    """As many elements of each tensor as the other ranks hold: with them this rank has the whole weights."""
    count = training.ranks.count
    full = (tensor.flatten() for _, tensor in training._learner.weights().items())
    return [each[: len(each) * (count - 1) // count].clone() for each in full]


def other_parts_and_gradients(training: RankTraining) -> list[Tensor]:
    """`other_parts`, and as much as the gradients of one model have, which are cleared after its steps."""
    return [*other_parts(training), *(each.clone() for each in training.state().weights.values())]


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The digest of full tensors."""
    found = WeightsDigest()
    for _ in found.added((name, full_tensor(tensor)) for name, tensor in tensors):
        pass
    return found.hexdigest()


def start(folder: Path, name: str, rendezvous: Rendezvous, learner: LearnerConfig = LEARNER) -> RankTraining:
    """Start to train the model in `folder` as one of `rendezvous`."""
    config = TrainingConfig(ranks=rendezvous.ranks.count, checkpoint_every=1, learner=learner)
    epoch = 0 if rendezvous.ranks.rank else 1  # as in a run: rank 0's counts
    return RankTraining(config, folder / "model", folder / name, epoch, rendezvous)


def train(training: RankTraining, number: int) -> None:
    """Train this rank's part of the batch `number`."""
    ranks = training.ranks
    part = make_batch(seed=number, number=number, groups=2, parts=ranks.count)[ranks.rank]
    training.add_part(replace(part, index=0, count=1, rank=ranks.rank), ranks.rank, number)
    training.train()


def run_models(folder: Path, name: str, rendezvous: Rendezvous, learner: LearnerConfig) -> dict[str, object]:
    """Take one update with `learner`, and return the peaks."""
    memory = Memory()
    training = memory.peak("construction", lambda: start(folder, name, rendezvous, learner))
    memory.peak("update", train, training, 0)
    return {"peaks": memory.peaks, "of_whole": memory.of_whole}


def run(folder: Path, name: str, rendezvous: Rendezvous) -> dict[str, object]:
    """Train as one of `rendezvous`, and return what was measured."""
    ranks, checkpoints, memory = rendezvous.ranks, folder / name, Memory()

    def publish(training: RankTraining, version: VersionBytes) -> None:
        training.joint.after_training()
        version.write(training)

    def checkpoint(training: RankTraining) -> None:
        writer = CheckpointWriter(training._config, training, checkpoints)
        writer.begin()
        writer.finish()
        writer.close()

    training = memory.peak("construction", lambda: start(folder, name, rendezvous))
    initial = digest(training.state().weights.items())
    memory.peak("update", train, training, 0)
    version = VersionBytes(training)
    memory.peak("publication", publish, training, version)
    published = [version.digest()]
    version = VersionBytes(training)
    publish_while_idle(training, version)
    published.append(version.digest())
    version = VersionBytes(training)
    memory.peak("remote", publish_remote, training, version)
    published.append(version.digest())
    memory.peak("gather", gather, training)
    trained = digest(sorted(training.state().weights.items()))
    memory.peak("checkpoint", checkpoint, training)
    ranks.maximum(0)  # rank 0 has completed the checkpoint
    saved = digest(training.state().tensors().items())
    del training
    gc.collect()
    resumed = memory.peak("resume", lambda: start(folder, name, rendezvous))
    restored = digest(resumed.state().tensors().items())
    train(resumed, 1)
    last = VersionBytes(resumed)
    publish(resumed, last)
    last.digest()
    return {
        "stopped": stop(resumed, CheckpointWriter(resumed._config, resumed, checkpoints)),
        "kept": [folder.name for folder in list_checkpoints(checkpoints)],
        "peaks": memory.peaks,
        "of_whole": memory.of_whole,
        "initial": initial,
        "trained": trained,
        "published": published,
        "saved": saved,
        "restored": restored,
        "files": sorted(file.name for file in list_checkpoints(checkpoints)[-1].iterdir()),  # type: ignore[union-attr]
    }


def stop(training: RankTraining, writer: CheckpointWriter) -> bool:
    """Stop all ranks from different places: 0 and 3 are stopped, 1 has a batch and 2 is idle. Whether all stopped."""
    rank = training.ranks.rank
    with suppress(RanksStop):
        if rank == 1:
            training.joint.before_training()
        while rank == 2:
            training.check()
    if rank == 0:
        keep_newest(training, writer, lambda: True)
    else:
        keep_with_rank_0(training, writer)
    writer.close()
    training.ranks.maximum(0)  # rank 0 has completed the checkpoint
    return training.joint.stopped or training.ranks.count == 1


class VersionBytes:
    """A file in shared memory that the ranks write, mapped by rank 0 with all its pages."""

    def __init__(self, training: RankTraining) -> None:
        self._layout = layout_of(training.joint.rounded)  # type: ignore[arg-type]
        self._memory = None
        if training.ranks.rank == 0:
            self._memory = VersionMemory(SHARED_MEMORY / f"{os.getpid()}.1.partial", self._layout.size)
            self._memory.prefault()
            self._memory.map[: len(self._layout.header)] = self._layout.header

    def write(self, training: RankTraining) -> None:
        """Write all ranks' weights, on rank 0."""
        if self._memory is not None:
            training.joint.write_to(self._memory.path, self._layout.tensor_views(memoryview(self._memory.map)))()

    def digest(self) -> str:
        """The digest of the tensors in the file, which is removed; empty on other ranks."""
        if self._memory is None:
            return ""
        found = digest(sorted(mapped_tensors(self._memory.path)))
        self._memory.remove()
        return found


def publish_while_idle(training: RankTraining, version: VersionBytes) -> None:
    """Publish while the other ranks are idle."""
    taken = training.joint._taken + 1
    version.write(training)
    while training.ranks.rank and training.joint._taken < taken:
        training.check()


def publish_remote(training: RankTraining, version: VersionBytes) -> None:
    """Publish while the other ranks have a batch; the last two of four are as on another machine."""
    taken, version_file.GROUP_BYTES = training.joint._taken + 1, 1 << 20  # several messages
    if training.ranks.rank > 1:
        joint_actions.open_file = lambda *_: nullcontext()  # type: ignore[assignment, return-value]
    version.write(training)
    while training.ranks.rank and training.joint._taken < taken:
        training.joint.before_training()
    if training.ranks.rank == 0:
        training.joint.before_training()


def gather(training: RankTraining) -> None:
    """Gather the full weights on rank 0, which keeps none."""
    taken = training.joint._taken + 1
    if training.ranks.rank == 0:
        for _ in training.joint.gather():
            pass
    while training.joint._taken < taken:
        training.check()


def reshard(folder: Path, name: str, rendezvous: Rendezvous) -> dict[str, object]:
    """Restore the first checkpoint of the run `name`, which another number of ranks wrote."""
    learner = Learner(LEARNER, folder / "model", ranks=rendezvous.ranks)
    with StoredState(list_checkpoints(folder / name)[0]) as stored:
        stored.verify(rendezvous.ranks)
        learner.restore(stored)
    return {"restored": digest(learner.state().tensors().items())}


def run_rank(rank: int, count: int, folder: Path, name: str, work: str) -> None:
    """Run `work` as rank `rank` of `count`."""
    torch.set_num_threads(1)
    rendezvous = join_process_group(AddressFile(folder / f"{name}.ranks.json"), Ranks(rank, count))
    if not work:
        found = run(folder, name, rendezvous)
    elif work in MODELS:
        found = run_models(folder, name, rendezvous, MODELS[work])
    else:
        found = reshard(folder, work, rendezvous)
    (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
    if count > 1:
        dist.barrier()
        dist.destroy_process_group()


def main(folder: Path, *jobs: str) -> int:
    """Fork the ranks of one job after the other; return 0 if all succeed."""
    return int(any(run_job(folder, *job.split(":")) for job in jobs))


def run_job(folder: Path, name: str, ranks_of_it: str, work: str = "") -> bool:
    """Whether a rank of the job failed."""
    count = int(ranks_of_it)
    return bool(fork_ranks(run_rank, count, count, folder, name, work))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
