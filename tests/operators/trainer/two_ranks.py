"""Ranks, each a process, train their parts of two batches with each config, and write the resulting tensors.

    python two_ranks.py FOLDER RANKS [steps | reshard | long]

FOLDER has models and cases.json, a list of [a model's name, a LearnerConfig, Ranks.shards, Ranks.context]. Rank R
writes the result of the first to R-0.safetensors: tensors, metrics, published weights, the number of gatherings of
layers in one batch, the most models that had gathered layers at once, and the time-outs of the process groups. With
`steps`, rank 0 instead writes the full tensors of each optimizer step of the first batch, trained after the second, to
steps-0.safetensors, with its metrics. With `reshard` the ranks restore the checkpoints that other ranks have written
without it, train the first batch, and rank 0 writes the full state to resharded-RANKS-0.safetensors. With `long` they
train the `long_batch`, and rank 0 writes the gradient to long-RANKS-0.safetensors.

Rank 1 has fewer sequences, and none of the second batch; further ranks have none. All are forked from one process, so
that torch and transformers are imported once; the test's own process cannot be forked, because it has run backward
passes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[3]), str(HERE.parents[2])]

from forked_ranks import fork_ranks  # noqa: E402
from optimizer_steps import OptimizerStep, record_steps  # noqa: E402
from pydantic import TypeAdapter  # noqa: E402
from trainer_batches import make_batch, pack_rows  # noqa: E402

from operators.trainer.checkpoint_files import (  # noqa: E402
    RankFile,
    StoredState,
    TrainerPosition,
    write_manifest,
    write_rank_file,
)
from operators.trainer.config import LearnerConfig  # noqa: E402
from operators.trainer.learner import Learner  # noqa: E402
from operators.trainer.learner_state import LearnerState  # noqa: E402
from operators.trainer.rank_addresses import AddressFile  # noqa: E402
from operators.trainer.ranks import ALONE, Ranks, full_tensor  # noqa: E402
from operators.trainer.rendezvous import join_process_group  # noqa: E402
from operators.trainer.version_file import ranks_without_file, write_parts  # noqa: E402
from schemas.records import MicroBatch, PolicyVersion  # noqa: E402

BATCHES = 2
LONG = 32_768
"""Tokens of the long sequence."""
TIMEOUT_S = 77.0


def parts(number: int, ranks: int = 2) -> list[list[MicroBatch]]:
    """Batch `number` by rank: three quarters and one quarter, then all and nothing. Groups span ranks."""
    made = make_batch(seed=number, number=number, parts=4)
    first = [made[:3], made[3:]] if number == 0 else [made, [empty(made[0], index=4)]]
    return first + [[empty(made[0], index=3 + rank)] for rank in range(2, ranks)]


def long_batch() -> MicroBatch:
    """A group of a sequence of `LONG` tokens and a short one."""
    source = np.random.default_rng(0)
    prompt, short, long = (source.integers(2, 200, length) for length in (4, 16, LONG - 4))
    return pack_rows([("p0.0", prompt, long, 1.0), ("p0.1", prompt, short, 0.0)], source)


def empty(part: MicroBatch, index: int) -> MicroBatch:
    """A part without a sequence."""
    columns = {field.name: getattr(part, field.name) for field in fields(part)}
    return replace(
        part, index=index, **{name: column[:0] for name, column in columns.items() if hasattr(column, "__len__")}
    )


def train(
    learner: Learner, batches: list[list[MicroBatch]], ranks: Ranks = ALONE
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Every tensor of the learner after `batches`, the gradients of each batch, and the metrics."""
    tensors, metrics = dict[str, torch.Tensor](), list[dict[str, float]]()

    def record_gradients() -> None:
        """Of the policy's last step; the critic's steps, which follow, find them cleared."""
        for name, parameter in learner.model.named_parameters():
            if parameter.grad is not None:
                tensors[f"gradient.{len(metrics)}.{name}"] = full_tensor(parameter.grad).clone()

    learner.before_change = record_gradients
    for batch in batches:
        metrics.append(learner.update(batch))
    learner.before_change = lambda: None
    tensors |= {f"published.{name}": tensor for name, tensor in published(learner, ranks).items()}
    state = learner.state()
    for kind in ("weights", "moments", "critic_weights", "critic_moments"):
        tensors |= {f"{kind}.{name}": full_tensor(each).clone() for name, each in getattr(state, kind).items()}
    return tensors, metrics


def published(learner: Learner, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The published weights: written by parts on rank 0, as if the others were on another machine, and gathered."""
    weights = learner.weights()
    gathered = {name: tensor.clone() for name, tensor in weights.items()}
    views = {name: np.zeros(tensor.nbytes, np.uint8) for name, tensor in gathered.items()}
    write = None if ranks.rank else lambda part: part.write(views)
    write_parts(weights, ranks, write, ranks_without_file(ranks, write))
    if ranks.rank:
        return gathered
    written = {name: torch.from_numpy(views[name]).view(each.dtype).view(each.shape) for name, each in gathered.items()}
    assert all(torch.equal(written[name], tensor) for name, tensor in gathered.items())
    return written


def main(folder: Path, count: int, work: str = "") -> int:
    """Fork the ranks; return 0 if all succeed."""
    return fork_ranks(run_rank, count, folder, count, work)


def run_rank(rank: int, folder: Path, count: int, work: str) -> None:
    """Run as rank `rank`."""
    torch.set_num_threads(1)
    addresses = AddressFile(folder / f"ranks-{count}{work}.json")
    ranks = join_process_group(addresses, Ranks(rank, count, timeout_s=TIMEOUT_S)).ranks
    cases = TypeAdapter(list[tuple[str, LearnerConfig, int, int]]).validate_json((folder / "cases.json").read_bytes())
    for number, (model, config, shards, context) in enumerate(cases):
        of_case = replace(ranks, shards=shards, context=context)
        if work == "steps":
            write_steps(config, of_case, folder / model, folder / f"steps-{number}.safetensors")
        elif work == "reshard":
            tensors, metrics = continued(config, of_case, folder, model, number)
            if rank == 0:
                out = folder / f"resharded-{count}-{number}.safetensors"
                save_file(tensors, out, {"metrics": json.dumps(metrics)})
        elif work == "long":
            write_long(config, of_case, folder / model, folder / f"long-{count}-{number}.safetensors")
        else:
            write_result(config, of_case, folder / model, folder / f"{rank}-{number}.safetensors")
    dist.destroy_process_group()


def write_result(config: LearnerConfig, ranks: Ranks, model: Path, out: Path) -> None:
    """Train with `config`, and check that a learner restored from the state continues identically."""
    before = group_timeouts()
    learner = Learner(config, model, ranks=ranks)
    opened = group_timeouts()[len(before) :]
    resumed = Learner(config, model, ranks=ranks)
    tensors, metrics = train(learner, [parts(number, ranks.count)[ranks.rank] for number in range(BATCHES)], ranks)
    restore_from_files(resumed, learner.state(), ranks, out.with_name(f"checkpoint-{out.stem[2:]}"))
    with counted_gatherings(learner) as gatherings:
        learner.update(parts(0, ranks.count)[ranks.rank])
    resumed.update(parts(0, ranks.count)[ranks.rank])
    pairs = zip(learner.state().weights.values(), resumed.state().weights.values(), strict=True)
    same = all(torch.equal(full_tensor(one), full_tensor(other)) for one, other in pairs)
    found = {"metrics": metrics, "resumed": same, "groups": opened, "default": before[0]}
    found |= {"gatherings": len(gatherings), "gathered models": max(gatherings, default=0)}
    save_file(tensors, out, {name: json.dumps(value) for name, value in found.items()})


def write_steps(config: LearnerConfig, ranks: Ranks, model: Path, out: Path) -> None:
    """Train the second batch, then the first, whose optimizer steps rank 0 writes."""
    learner = Learner(config, model, ranks=ranks)
    learner.update(parts(1, ranks.count)[ranks.rank])
    steps = {"actor": record_steps(learner._actor)}
    if learner._critic is not None:
        steps["critic"] = record_steps(learner._critic_trained)
    metrics = learner.update(parts(0, ranks.count)[ranks.rank])
    tensors = {
        f"{model}.{number}.{kind}.{name}": full_tensor(tensor).contiguous().clone()
        for model, taken in steps.items()
        for number, step in enumerate(taken)
        for kind in ("before", "gradient", "after")
        for name, tensor in getattr(step, kind).items()
    }
    if ranks.rank == 0:
        norms = {f"{model}.{n}": (s.norm, s.rate) for model, taken in steps.items() for n, s in enumerate(taken)}
        save_file(tensors, out, {"norms": json.dumps(norms), "metrics": json.dumps(metrics)})


def continued(
    config: LearnerConfig, ranks: Ranks, folder: Path, model: str, number: int
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The full state and the metrics after the first batch, trained from the checkpoint of the case `number` on."""
    learner = Learner(config, folder / model, ranks=ranks)
    with StoredState(folder / f"checkpoint-{number}") as stored:
        stored.verify(ranks)
        learner.restore(stored)
    own = parts(0, ranks.count)[ranks.rank :]
    metrics = learner.update(own[0] if ranks.count > 1 else [row for each in own for row in each])
    tensors = {name: full_tensor(each).contiguous().clone() for name, each in learner.state().tensors().items()}
    return tensors, metrics


def write_long(config: LearnerConfig, ranks: Ranks, model: Path, out: Path) -> None:
    """Train the long batch, of which the first rank of the context has all."""
    learner = Learner(config, model, ranks=ranks)
    batch = long_batch()
    tensors, metrics = train(learner, [[batch if ranks.rank == 0 else empty(batch, index=ranks.rank)]], ranks)
    if ranks.rank == 0:
        save_file(tensors, out, {"metrics": json.dumps(metrics)})


def read_steps(file: Path) -> tuple[dict[str, list[OptimizerStep]], dict[str, float]]:
    """What `write_steps` wrote: steps of actor and critic, and metrics."""
    tensors, metadata = read(file)
    norms = json.loads(metadata["norms"])
    found: dict[str, list[OptimizerStep]] = {"actor": [], "critic": []}
    for key, (norm, rate) in norms.items():
        kinds = [
            {name.removeprefix(start): each for name, each in tensors.items() if name.startswith(start)}
            for start in (f"{key}.{kind}." for kind in ("before", "gradient", "after"))
        ]
        found[key.partition(".")[0]].append(OptimizerStep(*kinds, norm=norm, rate=rate))
    return found, json.loads(metadata["metrics"])


def read(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and metadata of `file`."""
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118


def train_ranks(
    folder: Path, cases: list[tuple[str, dict[str, Any], int, int]], ranks: int = 2, work: str = ""
) -> Path:
    """Train the model in `folder` as `ranks` ranks in every case, with their results in `folder`."""
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, str(HERE), str(folder), str(ranks), work]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def group_timeouts() -> list[float]:
    """The time-outs of this process's groups, in seconds, the default group's first."""
    groups = dist.distributed_c10d._world.pg_map
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def restore_from_files(learner: Learner, state: LearnerState, ranks: Ranks, folder: Path) -> None:
    """Write `state` as a checkpoint to `folder` by all ranks, and restore it."""
    folder.mkdir(exist_ok=True)
    own = write_rank_file(folder, state, ranks)
    (folder / f"note-{ranks.rank}").write_text(json.dumps(asdict(own)))
    ranks.maximum(0)  # all have written
    if ranks.rank == 0:
        files = [RankFile(**json.loads((folder / f"note-{rank}").read_text())) for rank in range(ranks.count)]
        write_manifest(folder, state, TrainerPosition(PolicyVersion(1, 1), (0,) * ranks.count, 0), files)
    ranks.maximum(0)
    with StoredState(folder) as stored:
        learner.restore(stored)


def is_gathered(layer: FSDPModule) -> bool:
    """Whether this rank holds all parameters of `layer`."""
    return any(group.is_unsharded for group in layer._get_fsdp_state()._fsdp_param_groups)


@contextmanager
def counted_gatherings(learner: Learner) -> Iterator[list[int]]:
    """A list that grows with each gathering of a layer's parameters in this context, by the number of models that have
    a gathered layer then."""
    found: list[int] = []
    gather = _fsdp_param_group.foreach_all_gather
    models = [model for model in (learner._policy, learner._critic, learner._reference) if model is not None]
    layers = [[each for each in model.modules() if isinstance(each, FSDPModule)] for model in models]

    def counted(*arguments: Any, **named: Any) -> Any:
        found.append(sum(any(is_gathered(layer) for layer in of_model) for of_model in layers))
        return gather(*arguments, **named)

    _fsdp_param_group.foreach_all_gather = counted
    try:
        yield found
    finally:
        _fsdp_param_group.foreach_all_gather = gather


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
