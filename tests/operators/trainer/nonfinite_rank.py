"""Two ranks train a batch whose loss is infinite on rank 1 alone, and then the same batch as it is.

    python nonfinite_rank.py FOLDER

FOLDER has a model. Each rank writes FOLDER/R-S.json for S, the ranks of a copy of the model: per update the count of
skipped steps and a digest of the full weights.
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
from trainer_batches import make_batch  # noqa: E402

from infra.models.weights import WeightsDigest  # noqa: E402
from operators.trainer import learner as learner_module  # noqa: E402
from operators.trainer.config import LearnerConfig  # noqa: E402
from operators.trainer.learner import Learner  # noqa: E402
from operators.trainer.rank_addresses import AddressFile  # noqa: E402
from operators.trainer.ranks import Ranks, full_tensor  # noqa: E402
from operators.trainer.rendezvous import join_process_group  # noqa: E402


def digest(learner: Learner) -> str:
    found = WeightsDigest()
    weights = learner.state().weights.items()
    for _ in found.added((name, full_tensor(tensor).clone()) for name, tensor in weights):
        pass
    return found.hexdigest()


def be(rank: int, folder: Path) -> None:
    """Be rank `rank`."""
    torch.set_num_threads(1)
    ranks = join_process_group(AddressFile(folder / "ranks.json"), Ranks(rank, 2)).ranks
    part = replace(make_batch(parts=2)[rank], rank=rank)
    gradient = learner_module.policy_gradient
    for shards in (0, 1):
        learner = Learner(LearnerConfig(warmup_steps=0), folder / "model", ranks=replace(ranks, shards=shards))
        found = [(0.0, digest(learner))]
        for infinite in (True, False):
            extra = float("inf") if infinite and rank == 1 else 0.0
            learner_module.policy_gradient = lambda *args, extra=extra: gradient(*args) + extra
            metrics = learner.update([part])
            found.append((metrics["skipped_updates"], digest(learner)))
        (folder / f"{rank}-{shards}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path) -> int:
    """Fork the ranks; 0 if both succeeded."""
    return fork_ranks(be, 2, folder)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
