"""What goes beyond the Laminar paper, one by one: 72B on 1,024 GPUs with the schedule `laminar`, predicted.

    python -m benchmarks.beyond_paper [--part 8] [--steps 5] [--known] [--json]

The cluster is that of benchmarks/paper.py. Each row takes an addition out, or adds one. Longest first begins the groups
in the order of their true mean lengths, so no prediction of lengths could gain more.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from benchmarks.paper import P50, P99, Point, predict, speed_of
from benchmarks.results import SIMULATED_CODE, Result, Results, add_results, code_hash
from operators.placement import moves, place_trajectories, repack
from operators.placement.waiting_work import WaitingWork
from operators.placement.work_table import Work
from operators.rollout.emulation_config import LengthsConfig
from operators.rollout.response_lengths import open_lengths
from schemas.identity import Purpose, trajectory_id
from schemas.records import Prompt

BASE = "the paper's split, with all additions"


class LongestTrueFirst(WaitingWork):
    """Waiting work whose training group of the largest true mean length comes first."""

    def head(self, purpose: Purpose) -> Work | None:
        queue = self._queues[purpose]
        if purpose == "train" and queue and not queue[0].work.member:
            ordered = sorted(queue, key=lambda entry: -_tokens(entry.work.prompt))
            queue.clear()
            queue.extend(ordered)
        return super().head(purpose)


_lengths = open_lengths(LengthsConfig(P50, P99))


@cache
def _tokens_of(seed: int, number: int, samples: int) -> int:
    return sum(_lengths(seed, trajectory_id("train", number, member)) for member in range(samples))


def _tokens(prompt: Prompt) -> int:
    """The length of all samples of `prompt` together."""
    return _tokens_of(prompt.sampling.seed, prompt.number, prompt.samples)


@dataclass(frozen=True)
class Variant:
    """A point, and what is taken out of the code while it is predicted."""

    point: Point
    without: AbstractContextManager[Any] | None = None

    def predict(self, part: int, seed: int, steps: int) -> Result:
        """Predict it."""
        with self.without or nullcontext():
            return predict(self.point, part, seed, steps)


def variants() -> Iterator[tuple[str, Variant]]:
    """Each row by its name."""
    point = partial(Point, "72B", "large", "laminar")
    yield BASE, Variant(point())
    yield "without KV transfer", Variant(point(changes=(("rollout.kv_megabytes", 0),)))
    no_parts = patch.object(repack._Room, "_fit_parts", lambda *load, fullest_first: [])
    yield "each source to one destination", Variant(point(), no_parts)
    yield "without queue balancing", Variant(point(), patch.object(moves, "plan_queue_balancing", lambda *a, **b: []))
    yield "without repack and queue balancing", Variant(point(changes=(("placement.repack", False),)))
    yield "longest first", Variant(point(), patch.object(place_trajectories, "WaitingWork", LongestTrueFirst))
    yield "with speculation", Variant(point(changes=(("rollout.speculation", True),)))
    yield "staleness bound 2", Variant(point(changes=(("experience.max_staleness", 2),)))
    for share in (10 / 16, 11 / 16, 13 / 16):
        train = round(1024 * share)
        yield f"{train} GPUs train, {1024 - train} generate", Variant(point(train_share=share))


def main() -> None:
    """Predict and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--part", type=int, default=8, choices=(1, 2, 4, 8), help="predict this part of it")
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--seed", type=int, default=0)
    add_results(arguments, "runs/beyond_paper.json")
    options = arguments.parse_args()
    results, rows = Results(options.results), dict[str, Result]()
    code = code_hash(*SIMULATED_CODE, Path(__file__), Path(__file__).with_name("paper.py"))
    for name, variant in variants():
        key = f"{name} part={options.part} steps={options.steps} seed={options.seed} code={code}"
        if not options.known:
            results.add(key, partial(variant.predict, options.part, options.seed, options.steps))
        if found := results.get(key):
            rows[name] = found
    if options.json:
        print(json.dumps(rows))
        return
    console = Console(width=120)
    console.print(_table(rows))
    for line in speed_of(rows):
        console.print(line)


def _table(rows: Mapping[str, Result]) -> Table:
    table = Table(title="Beyond the paper: 72B on 1,024 GPUs")
    figures = "thousand tokens/s", "gain", "KV use", "rollouts idle", "trainer idle", "latency, s", "staleness"
    for column in ("", *figures):
        table.add_column(column, justify="right" if column else "left")
    base = rows.get(BASE, {}).get("tokens_per_s")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['tokens_per_s'] / 1000:,.1f}",
            f"{100 * (row['tokens_per_s'] / base - 1):+.1f} %" if base else "",
            *(f"{100 * row[key]:.1f} %" for key in ("kv_use", "rollout_idle", "trainer_idle")),
            f"{row['latency_s']:.0f}",
            f"{row['staleness_mean']:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
