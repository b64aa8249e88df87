"""Measures the error of bfloat16 gradients against float32 at the same weights, in every optimizer step of an update.

    python bfloat16_errors.py FOLDER COUNTS

FOLDER has a model; COUNTS is a JSON list of pairs of mini-batches and epochs. Two ranks, each a forked process, train
half a batch each; rank 0 writes errors.json: a list of the steps' errors for each pair. The processes are forked from
one that has never run a backward pass.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[3]), str(HERE.parents[2])]

from forked_ranks import fork_ranks  # noqa: E402
from optimizer_steps import OptimizerStep, distance, record_steps  # noqa: E402
from trainer_batches import make_batch  # noqa: E402

from operators.trainer.config import AlgorithmConfig, LearnerConfig, Precision  # noqa: E402
from operators.trainer.learner import Learner  # noqa: E402
from operators.trainer.rank_addresses import AddressFile  # noqa: E402
from operators.trainer.ranks import ALONE, Ranks  # noqa: E402
from operators.trainer.rendezvous import join_process_group  # noqa: E402

WITHOUT_CLIP = AlgorithmConfig(name="grpo", correction_cap=5.0, clip_low=1.0, clip_high=1e6)
"""No clip: at a clip bound, rounding alone decides whether a token has a gradient."""
TOKEN_MEAN = AlgorithmConfig(name="tis", clip_low=1.0, clip_high=1e6)
"""The default algorithm without its clip: the few tokens that are far off after four epochs decide its error, 2.4 %."""


def bfloat16_errors(
    folder: Path, mini_batches: int, epochs: int, ranks: Ranks = ALONE, algorithm: AlgorithmConfig = WITHOUT_CLIP
) -> list[float]:
    """The relative L2 error of each optimizer step's gradient in one update.

    At this rate gradients of weights that are one step old have errors of 16 % and more.
    """
    made = make_batch(11, groups=4, samples=4, parts=ranks.count)[ranks.rank :: ranks.count]
    found: dict[Precision, list[OptimizerStep]] = {}
    precisions: tuple[Precision, ...] = ("bfloat16", "float32")
    for precision in precisions:
        config = LearnerConfig(
            algorithm=algorithm,
            precision=precision,
            mini_batches=mini_batches,
            epochs=epochs,
            learning_rate=1e-4,
            warmup_steps=0,
        )
        learner = Learner(config, folder, ranks=ranks)
        found[precision] = record_steps(learner._actor, found.get("bfloat16"))
        learner.update([replace(part, rank=ranks.rank) for part in made])
    pairs = zip(found["bfloat16"], found["float32"], strict=True)
    return [distance(rounded.gradient, exact.gradient, ranks) for rounded, exact in pairs]


def main(folder: Path, counts: list[tuple[int, int]]) -> int:
    """Fork the ranks; 0 if both succeeded."""
    return fork_ranks(be, 2, folder, counts)


def be(rank: int, folder: Path, counts: list[tuple[int, int]]) -> None:
    """Be rank `rank`."""
    torch.set_num_threads(1)
    ranks = join_process_group(AddressFile(folder / "ranks.json"), Ranks(rank, 2)).ranks
    errors = [bfloat16_errors(folder / "model", *each, ranks) for each in counts]
    if rank == 0:
        (folder / "errors.json").write_text(json.dumps(errors))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
