"""Longest first in real emulated runs: Kafka, the pipelines and placement, with and without repack.

    python -m benchmarks.length_order [--recorded FILE] [--share 0.9] [--time-scale 4] [--seed 0] [--json]

The cluster and the lengths are those of benchmarks/length_prediction.py: 8 replicas of a 32B model, a data set that is
read several times, lengths drawn with a share of their variance between prompts, or recorded. Placement dispatches
groups in the order of the log, so the log is written in the order to be measured: as drawn, or the groups of each
global batch longest first, by the lengths of earlier epochs or by each prompt's true mean, the most that a prediction
could gain. `spread` takes every second group of twice a replica's batch, as in that simulation, so that no replica gets
all long ones. Runs of one setting of repack are concurrent: other work on the machine affects them alike.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.emulated_runs import RunMeasurement, run_emulated
from benchmarks.expected_lengths import length_prior, longest_first
from benchmarks.length_prediction import CLUSTER, GROUP, DataSet, cluster_changes
from benchmarks.repack import EXAMPLE
from pipelines.present.report.machine import describe_machine

ORDERS = ("log order", "by earlier epochs", "by earlier epochs, spread", "by true means")
WINDOW = CLUSTER.global_batch // GROUP
"""Groups that are ordered among each other: those of a global batch."""


def ordered_groups(data: DataSet, order: str, count: int) -> Iterator[np.ndarray]:
    """The response lengths of the next `count` groups, int64[GROUP] each, in `order`; epochs begin again after all."""
    epochs, prompts, _ = data.lengths.shape
    drawn = [(number // prompts % epochs, number % prompts) for number in range(count)]
    for first in range(0, count, WINDOW):
        window = drawn[first : first + WINDOW]
        for place in _order(data, order, window):
            yield data.lengths[window[place]]


def _order(data: DataSet, order: str, window: Sequence[tuple[int, int]]) -> Sequence[int]:
    if order == "log order":
        return range(len(window))
    if order == "by true means":
        means = data.lengths.mean((0, 2))
        return sorted(range(len(window)), key=lambda place: -means[window[place][1]])
    known = [data.lengths[:epoch, prompt].ravel().tolist() for epoch, prompt in window]
    ranked = longest_first(known, length_prior(known))
    return _spread(ranked, CLUSTER.batch // GROUP) if order.endswith("spread") else ranked


def _spread(ranked: Sequence[int], batch: int) -> list[int]:
    """The places of `ranked` by turns: every second of the next 2 × `batch` in the log, the first of `ranked` first."""
    rank = {place: number for number, place in enumerate(ranked)}
    left, chosen = sorted(ranked), list[int]()
    while left:
        near = sorted(left[: 2 * batch], key=rank.__getitem__)
        taken = near[::2] if len(near) > batch else near
        chosen += taken
        left = [place for place in left if place not in taken]
    return chosen


def write_lengths(file: Path, groups: Iterator[np.ndarray]) -> None:
    """Write the lengths of the members of each group, by trajectory id, as `rollout.emulation.lengths.file`."""
    with file.open("w") as lines:
        for number, lengths in enumerate(groups):
            for member, length in enumerate(lengths.tolist()):
                lines.write(json.dumps({"trajectory_id": f"p{number}.{member}", "length": length}) + "\n")


def run_order(data: DataSet, order: str, repack: bool, folder: Path, options: argparse.Namespace) -> RunMeasurement:
    """Run the prompts of `data` in `order`. Raises RunFailed."""
    name = f"{'repack' if repack else 'none'}-{order.replace(',', '').replace(' ', '-')}-{options.seed}"
    file = folder / f"{name}.jsonl"
    write_lengths(file, ordered_groups(data, order, 2 * options.steps * WINDOW))
    settings = cluster_changes(repack, options.time_scale, options.steps, options.seed)
    return run_emulated(EXAMPLE, name, folder, [*settings, f"rollout.emulation.lengths.file={file}"])


def main() -> None:
    """Run and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--recorded", type=Path, help="recorded lengths")
    arguments.add_argument("--share", type=float, default=0.9, help="share of drawn lengths' variance between prompts")
    arguments.add_argument("--epochs", type=int, default=3)
    arguments.add_argument("--prompts", type=int, default=192)
    arguments.add_argument("--steps", type=int, default=6)
    arguments.add_argument("--time-scale", type=float, default=4.0)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    source = DataSet.recorded if options.recorded else DataSet.drawn
    data = source(options.recorded or options.share, options.epochs, options.prompts, options.seed)  # type: ignore[operator]
    found: dict[str, RunMeasurement] = {}
    with tempfile.TemporaryDirectory(prefix="laminar-order-") as temporary, ThreadPoolExecutor() as pool:
        for repack in (False, True):
            runs = [pool.submit(run_order, data, order, repack, Path(temporary), options) for order in ORDERS]
            found |= {f"{'repack' if repack else 'none'}, {o}": r.result() for o, r in zip(ORDERS, runs, strict=True)}
    if options.json:
        print(json.dumps({name: each.to_json() for name, each in found.items()}))
        return
    console = Console(width=110)
    console.print(_table(found))
    console.print(
        f"time scale {options.time_scale:g}, {options.steps} steps, seed {options.seed}; {describe_machine()}"
    )


def _table(found: dict[str, RunMeasurement]) -> Table:
    table = Table(title=f"{CLUSTER.replicas} replicas, groups of a batch longest first")
    columns = ("moves, order", "seconds", "trained tokens/s", "generated tokens/s", "latency s", "staleness", "moved")
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for name, each in found.items():
        rates = f"{each.trained_tokens_per_s:,.0f}", f"{each.generated_tokens_per_s:,.0f}"
        others = f"{each.latency_s:.1f}", f"{each.staleness_mean:.2f}", f"{each.moves.moved:,}"
        table.add_row(name, f"{each.seconds:,.0f}", *rates, *others)
    return table


if __name__ == "__main__":
    main()
