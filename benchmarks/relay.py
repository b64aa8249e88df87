"""What publishing costs the trainer and pulling a rollout, against a plain copy of the same bytes, in one run.

    OMP_NUM_THREADS=1 python benchmarks/relay.py

The copy it is measured against is torch's own, tensor by tensor, between memory that is there already; repetitions
alternate. A publish is timed as the trainer feels it: until `publish` returns. "pages" is what it takes to get memory
ready for a version, which the publisher does beforehand, in its thread; "behind" is what that thread does after a
publish: hash, seal, evict, and pages for the next. A pull is what a rollout does: pin, map, and copy tensor by tensor
into the model's; "read" reads the file into the tensors without mapping it.
No broker takes part: the trainer does not wait for a manifest's way into the log.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from infra.store.names import default_root
from infra.store.publisher import Publisher
from infra.store.weight_store import WeightStore
from operators.trainer.tensor_bytes import copy_tensor, tensor_specs
from schemas.records import PolicyVersion, WeightVersion

_MEGABYTE = 1_000_000
_TENSOR_BYTES = 16 * _MEGABYTE
_COLUMNS = (
    "weights",
    "copy ms",
    "publish ms",
    "ratio",
    "(min-max)",
    "pages ms",
    "behind ms",
    "pull ms",
    "ratio",
    "(min-max)",
    "read ms",
    "ratio",
)

Tensors = dict[str, torch.Tensor]


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--megabytes", type=float, nargs="+", default=[2.4, 100, 1000])
    arguments.add_argument("--repetitions", type=int, default=7)
    arguments.add_argument("--threads", type=int, default=1)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    table = Table(title=f"Publish and pull, {options.threads} thread(s), torch {torch.__version__}")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for megabytes in options.megabytes:
        table.add_row(f"{megabytes:g} MB", *_measure(_tensors(int(megabytes * _MEGABYTE)), options.repetitions))
    Console(width=140).print(table)


def _tensors(size: int) -> Tensors:
    """Random float32 tensors of `size` bytes in all, at least eight."""
    count = max(8, -(-size // _TENSOR_BYTES))
    return {f"layer.{index}.weight": torch.randn(size // count // 4) for index in range(count)}


def _measure(weights: Tensors, repetitions: int) -> Iterator[str]:
    """The cells of a row."""
    copies = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    manifests: list[WeightVersion] = []
    with WeightStore(default_root("benchmark"), keep=1) as store:
        try:
            started = time.perf_counter()
            publisher = Publisher(store, manifests.append, tensor_specs(weights), copy=copy_tensor)
            publisher.flush()
            pages = time.perf_counter() - started
            copy, publish, behind, pull, read = [], [], [], [], []
            for number in range(1, repetitions + 1):
                copy.append(_timed(lambda: _copy(weights, copies)))
                publish.append(_timed(lambda n=number: _publish(publisher, weights, n)))
                behind.append(_timed(publisher.flush))
                pull.append(_timed(lambda: _pull(store, manifests[-1], copies)))
                read.append(_timed(lambda: _read(store, manifests[-1], copies)))
            publisher.close()
        finally:
            store.destroy()
    yield from (_ms(copy), _ms(publish), *_ratio(publish, copy))
    yield from (_ms([pages]), _ms(behind), _ms(pull), *_ratio(pull, copy), _ms(read), _ratio(read, copy)[0])


def _copy(weights: Tensors, copies: Tensors) -> None:
    for name, tensor in weights.items():
        copies[name].copy_(tensor)


def _publish(publisher: Publisher, weights: Tensors, number: int) -> None:
    publisher.publish(
        weights, PolicyVersion(1, number), step=number, batches=(), batch_offsets=(), trajectories_trained=0
    )


def _pull(store: WeightStore, manifest: WeightVersion, copies: Tensors) -> None:
    """What a rollout does: pin the version and copy it into tensors that are there."""
    with store.pin(manifest.version, manifest.blake3) as path, safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            copies[name].copy_(file.get_tensor(name))


def _read(store: WeightStore, manifest: WeightVersion, copies: Tensors) -> None:
    with store.pin(manifest.version, manifest.blake3) as path, path.open("rb", buffering=0) as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        for spec in manifest.tensors:  # in the order of the file
            memory = memoryview(copies[spec.name].numpy()).cast("B")
            assert file.readinto(memory) == len(memory)


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1000:.2f}"


def _ratio(ours: list[float], copy: list[float]) -> tuple[str, str]:
    """Median of the ratios of each repetition, and their range."""
    ratios = [mine / its for mine, its in zip(ours, copy, strict=True)]
    return f"{statistics.median(ratios):.2f}", f"({min(ratios):.2f}-{max(ratios):.2f})"


if __name__ == "__main__":
    main()
