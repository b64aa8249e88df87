"""Several ranks, each on a GPU of its own over NCCL: their weights beside those of one rank, and their tokens/s."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.batches import batch_of, training_batch
from benchmarks.gpu.device import make_model
from benchmarks.gpu.figures import Figure, figure_of, peak_bytes, seconds
from benchmarks.gpu.learner import learner_config
from benchmarks.gpu.paths import PENALTY, PPO, learner_of, make_mixture
from benchmarks.gpu.settings import GIB, TINY, Settings
from infra.models.device_copies import use_device
from operators.trainer import learner as learner_module
from operators.trainer.context_parallel import ContextGroup
from operators.trainer.learner import Learner
from operators.trainer.memory_plan import plan_memory, shape_of
from operators.trainer.ranks import ALONE, Ranks
from schemas.records import MicroBatch, PolicyVersion

ROWS = 6
"""Sequences of a rank in the comparison: groups of four span ranks."""
_LENGTH = 64
_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG = 1

OfRanks = Callable[[Settings, Path, Ranks], list[Figure]]


def equal_ranks(settings: Settings, model: Path) -> list[Figure]:
    """How far weights after two updates by all ranks differ from those by one, as a share of their change."""
    tiny, mixture = model.with_name("several"), model.with_name("several-mixture")
    make_model(replace(settings, shape=TINY, device="cpu"), tiny)
    make_mixture(mixture)
    return _on_ranks(settings, model, _differences)


def learner_ranks(settings: Settings, model: Path) -> list[Figure]:
    """Tokens/s of an update in bfloat16 by all ranks, each with as many sequences as one trains alone."""
    return _on_ranks(settings, model, _speed)


def _differences(settings: Settings, model: Path, ranks: Ranks) -> list[Figure]:
    tiny, mixture = model.with_name("several"), model.with_name("several-mixture")
    halves, pairs = replace(ranks, shards=ranks.count // 2), replace(ranks, context=2)
    ways: dict[str, tuple[Path, Ranks, dict[str, Any]]] = {
        "ranks": (tiny, ranks, {}),
        "PPO, kept gathered": (tiny, ranks, {"algorithm": PPO, "mini_batches": 2, "keep_gathered": True}),
        "penalty, offloaded": (tiny, ranks, {"algorithm": PENALTY, "offload": ("moments", "reference")}),
        "mixture of experts": (mixture, ranks, {}),
    }
    if ranks.count % 2 == 0:
        ways |= {"two copies": (tiny, halves, {}), "context of two": (tiny, pairs, {"gradient_checkpointing": True})}
    learner_module.gather_rows = _rows_of_group
    figures = []
    for name, (folder, own, options) in ways.items():
        whole = learner_of(settings, folder, settings.device, **options)
        before = _weights(whole)
        learner = learner_of(settings, folder, settings.device, own, **options)
        for number in range(2):
            whole.update([_part(number, each, ranks.count) for each in range(ranks.count)])
            learner.update([_part(number, ranks.rank, ranks.count)])
        expected, found = (_weights(each).double() for each in (whole, learner))
        difference = float((found - expected).norm() / (expected - before.double()).norm())
        figures.append(Figure(f"weights, {name}", difference, "", ("<=", 1e-3)))
    return figures


def _speed(settings: Settings, model: Path, ranks: Ranks) -> list[Figure]:
    config = learner_config(settings, "bfloat16")
    learner = Learner(config, model, settings.device, ranks)
    vocabulary, first = int(settings.shape.config["vocab_size"]), ranks.rank * settings.sequences
    part = batch_of(settings.sequences, settings.length, vocabulary, first)
    took = seconds(settings.device, lambda: learner.update([part]), settings.repetitions)
    tokens = ranks.count * settings.sequences * settings.length
    figures = [Figure("trained", tokens / took, "tokens/s", note=f"by {ranks.count} ranks")]
    if peak := int(ranks.maximum(peak_bytes(settings.device))):
        planned = plan_memory(shape_of(model), ranks.count, config).total
        note = f"{planned / GIB:.1f} GiB planned"
        figures += [
            Figure("peak memory of a rank", peak / GIB, "GiB"),
            Figure("peak memory over the formula", peak / planned, "", ("<=", 1.0), note),
        ]
    return figures


def _part(number: int, rank: int, count: int) -> MicroBatch:
    """The part of `rank` of batch `number`, which changes the weights of version 0.`number`."""
    rows, first = ROWS * count, ROWS * rank
    drawn = np.random.default_rng([7, number]).integers(1, 500, (rows, _LENGTH))[first : first + ROWS]
    logprobs = np.where(np.arange(_LENGTH) >= 32, -np.log(int(TINY.config["vocab_size"])), 0.0)
    rewards = np.tile([0.0, 1.0], rows // 2)[first : first + ROWS]
    made = training_batch(drawn, 32, [logprobs] * ROWS, rewards, PolicyVersion(0, number), first)
    return replace(made, index=rank)


def _rows_of_group(rows: Sequence[MicroBatch], context: ContextGroup) -> list[Sequence[MicroBatch]]:
    """The parts of a context group, made again instead of exchanged: the codec needs further packages."""
    if context.count == 1:
        return [rows]
    first, count = dist.get_rank() - context.rank, dist.get_world_size()
    return [[_part(rows[0].batch, first + each, count)] for each in range(context.count)]


def _weights(learner: Learner) -> Tensor:
    """The policy's full weights as one vector on the CPU. A collective."""
    return torch.cat([each.detach().flatten().cpu() for _, each in learner.weights().items()])


def _on_ranks(settings: Settings, model: Path, call: OfRanks) -> list[Figure]:
    """What `call` returns on rank 0, after all ranks have called it. Raises RuntimeError with the first error."""
    start: Any = multiprocessing.get_context(settings.start)
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [
            start.Process(target=_be_rank, args=(rank, settings, model, call, Path(scratch)))
            for rank in range(settings.gpus)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        for rank in range(settings.gpus):
            if (error := Path(scratch, f"{rank}.error")).exists():
                raise RuntimeError(f"rank {rank}: {error.read_text('utf-8')}")
        if ended := [each.exitcode for each in ranks if each.exitcode]:
            raise RuntimeError(f"a rank ended with exit code {ended[0]}")
        return [figure_of(entry) for entry in json.loads(Path(scratch, "0.json").read_text("utf-8"))]


def _be_rank(rank: int, settings: Settings, model: Path, call: OfRanks, scratch: Path) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a part that takes too long is killed
    kind = settings.device
    try:
        torch.set_num_threads(1)
        own = replace(settings, device=kind if kind == "cpu" else f"{kind}:{rank}")
        use_device(own.device)
        # As `rendezvous.join_process_group` does, which needs Kafka's packages.
        dist.init_process_group(
            "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:nccl",
            store=dist.FileStore(str(scratch / "store"), settings.gpus),
            rank=rank,
            world_size=settings.gpus,
            timeout=timedelta(seconds=_TIMEOUT_S),
        )
        figures = call(own, model, replace(ALONE, rank=rank, count=settings.gpus, timeout_s=_TIMEOUT_S))
        (scratch / f"{rank}.json").write_text(json.dumps([each.as_json() for each in figures]), "utf-8")
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - whatever fails is this part's result
        traceback.print_exc()
        (scratch / f"{rank}.error").write_text(f"{type(error).__name__}: {error}"[:300], "utf-8")
        os._exit(1)  # the others fail at their next collective
