"""The stall of a publication: how long 1, 2 and 4 ranks wait while their parts of the weights are written to the store.

    OMP_NUM_THREADS=1 python -m benchmarks.publication
    OMP_NUM_THREADS=1 python -m benchmarks.publication --json

Ranks are processes that shard a random model of 33 M parameters over gloo, and publish it in `--dtype` to a store in
shared memory. With `--remote` all ranks but the first are as on another machine: they send their parts to it over gloo;
beside the bytes a second of these parts, until the version is written, are those of as many bytes from so many
processes that serve them over the relay's frames (`benchmarks/version_sources.py`), into plain memory. The stall
is the time until a rank can begin the next update, which computes its gradients while the weights are written; the
optimizer step waits for that ("written after"). It is beside one thread's copy of as many bytes, which alternates with
it; figures are medians. Ranks share this machine's cores, so the times of several ranks are those of cores that take
turns; CPU seconds are of rank 0 alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.engine_sides import Measured, now, since
from benchmarks.models import qwen2
from benchmarks.stores import publish, temporary_store
from benchmarks.tables import print_rows
from benchmarks.version_sources import frames_rate
from infra.models.dtypes import tensor_specs
from infra.store.names import default_root
from infra.store.publisher import Publisher
from operators.trainer import joint_actions
from operators.trainer.rank_training import RankTraining
from operators.trainer.rendezvous import Rendezvous
from operators.trainer.replay import forked_ranks
from operators.trainer.training_config import TrainingConfig
from schemas.records import PolicyVersion

_WARM_UPS = 2
SHAPE = qwen2(384, 1344, 16, 8, 2048, kv=4, context=64)


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    arguments.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    arguments.add_argument("--repetitions", type=int, default=9)
    arguments.add_argument("--remote", action="store_true", help="all ranks but the first are on another machine")
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.folder:
        ranks, dtype, repetitions = options.ranks[0], options.dtype, options.repetitions
        print(json.dumps(measure(options.folder, ranks, dtype, repetitions, remote=options.remote)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch) / "model", SHAPE)
        rows = [_in_process(Path(scratch), ranks, options) for ranks in options.ranks]
        if options.remote:
            rows = [row | remote_rates(Path(scratch), row, options.repetitions) for row in rows]
    print_rows(rows, f"Publication in {options.dtype}", options.json)


def make_model(folder: Path, shape: Mapping[str, Any]) -> None:
    """Save a random model."""
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**shape)).to(torch.bfloat16).save_pretrained(folder)


def measure(folder: Path, ranks: int, dtype: str, repetitions: int, *, remote: bool = False) -> dict[str, float]:
    """The stall with `ranks` ranks, of which this process becomes the first."""
    torch.set_num_threads(1)
    config = TrainingConfig(ranks=ranks)

    def follow(own: Rendezvous) -> None:
        if remote:
            joint_actions.open_file = lambda *_: nullcontext()  # type: ignore[assignment, return-value]
        training = open_training(own)
        for _ in range(_WARM_UPS + repetitions):
            training.joint.after_training()

    def open_training(own: Rendezvous) -> RankTraining:
        return RankTraining(config, folder / "model", folder / "none", 1, own, dtype=dtype)

    with forked_ranks(config, follow, folder / f"{ranks}") as own:
        training = open_training(own)
        specs = tensor_specs(training.joint.rounded.specs())
        stalls, written, copies, size = [], [], [], 0
        with (
            temporary_store(default_root("publication")) as store,
            closing(Publisher(store, lambda _: None, specs)) as to,
        ):
            for number in range(1, _WARM_UPS + repetitions + 1):
                began = now()
                publish(to, training.joint, PolicyVersion(1, number))
                stalls.append(since(began))
                training.joint.wait_until_written()
                written.append(since(began))
                to.flush()
                size = store.path(PolicyVersion(1, number)).stat().st_size
                copies.append(_copy(size))
    stall, written_after, copy = (_median(each[_WARM_UPS:]) for each in (stalls, written, copies))
    return {
        "ranks": ranks,
        "MB": size / 1e6,
        "stall, ms": 1e3 * stall.wall,
        "written after, ms": 1e3 * written_after.wall,
        "copy, ms": 1e3 * copy.wall,
        "CPU ms": 1e3 * written_after.cpu,
        "copy, CPU ms": 1e3 * copy.cpu,
        "ratio by CPU": written_after.cpu / copy.cpu,
    }


def _in_process(folder: Path, ranks: int, options: argparse.Namespace) -> dict[str, float]:
    """`measure` in a process of its own: a process can be a rank once."""
    command = [sys.executable, "-m", "benchmarks.publication", "--folder", str(folder), "--ranks", str(ranks)]
    command += ["--dtype", options.dtype, "--repetitions", str(options.repetitions)]
    command += ["--remote"] * options.remote
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def remote_rates(folder: Path, row: Mapping[str, float], repetitions: int) -> dict[str, float]:
    """GB/s of the parts that the ranks of `row`, of `measure`, sent to the first, and of as much in relay frames."""
    sources = int(row["ranks"]) - 1
    if not sources:
        return {"gloo, GB/s": 0.0, "frames, GB/s": 0.0}
    size = int(row["MB"] * 1e6 * sources / row["ranks"])
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(np.random.default_rng(0).bytes(size))
        file.flush()
        frames = frames_rate(Path(file.name), sources, repetitions)
    return {"gloo, GB/s": size / 1e6 / row["written after, ms"], "frames, GB/s": frames / 1e9}


def _copy(size: int) -> Measured:
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    began = now()
    target.copy_(source)
    return since(began)


def _median(figures: list[Measured]) -> Measured:
    return Measured(statistics.median(each.wall for each in figures), statistics.median(each.cpu for each in figures))


if __name__ == "__main__":
    main()
