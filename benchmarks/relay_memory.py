"""The cost of a publish for the trainer and of a pull for a rollout, beside torch's copy of the same bytes.

The copy goes tensor by tensor between allocated memory; repetitions alternate. A publish is timed until `publish`
returns, which is the trainer's stall. A pull pins the version and reads it into the model's tensors, as a rollout does.
There is no broker: the trainer does not wait until a manifest is in the log.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.stores import publish, temporary_store
from benchmarks.tensor_copies import copy_tensor
from infra.models.dtypes import tensor_specs
from infra.models.weights import read_tensors
from infra.store.names import default_root
from infra.store.publisher import Publisher
from infra.store.weight_store import WeightStore
from schemas.records import PolicyVersion, WeightVersion

TENSOR_BYTES = 16_000_000

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class MemoryTimes:
    """Seconds of each repetition."""

    copy: list[float]
    publish: list[float]
    pull: list[float]

    def ratio(self, ours: list[float]) -> float:
        """The median over repetitions of the ratio to the copy."""
        return statistics.median(mine / its for mine, its in zip(ours, self.copy, strict=True))


def measure_memory(megabytes: float, repetitions: int) -> MemoryTimes:
    """Publish and pull versions of `megabytes` · 10^6 bytes."""
    weights = _tensors(int(megabytes * 1_000_000))
    copies = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    manifests: list[WeightVersion] = []
    copy, stall, pull = [], [], []
    with temporary_store(default_root("benchmark"), keep=1) as store:
        publisher = Publisher(store, manifests.append, tensor_specs(weights), copy=copy_tensor)
        publisher.flush()
        for number in range(1, repetitions + 1):
            copy.append(_timed(lambda: _copy(weights, copies)))
            stall.append(_timed(partial(publish, publisher, weights, PolicyVersion(1, number))))
            publisher.flush()
            pull.append(_timed(lambda: _pull(store, manifests[-1], copies)))
        publisher.close()
    return MemoryTimes(copy, stall, pull)


def _tensors(size: int) -> Tensors:
    """At least eight random float32 tensors, of `size` bytes in total."""
    count = max(8, -(-size // TENSOR_BYTES))
    return {f"layer.{index}.weight": torch.randn(size // count // 4) for index in range(count)}


def _copy(weights: Tensors, copies: Tensors) -> None:
    for name, tensor in weights.items():
        copies[name].copy_(tensor)


def _pull(store: WeightStore, manifest: WeightVersion, copies: Tensors) -> None:
    with store.pin(manifest.version, manifest.blake3) as path:
        read_tensors(path, copies)


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
