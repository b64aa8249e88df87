"""What goes beyond the Laminar paper, one by one: 72B on 1,024 GPUs with the schedule `laminar`, predicted.

    python -m benchmarks.beyond_paper [--part 1] [--steps 5] [--known] [--json]

The cluster is that of benchmarks/paper.py. Each indented row changes one thing of the row above that is not indented.
With the paper's split the trainer limits the speed, so what helps generation is changed where fewer GPUs generate.
Longest first begins the groups in the order of their true mean lengths: no prediction of lengths could gain more.
"""

from __future__ import annotations

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

from benchmarks.paper import P50, P99, Point, predict, predicted_rows, prediction_arguments, speed_of
from benchmarks.results import Result
from operators.io.elements import ReceivedRecord
from operators.placement import moves, place_trajectories, repack
from operators.placement.waiting_work import WaitingWork
from operators.placement.work_table import Work
from operators.rollout.emulation_config import LengthsConfig
from operators.rollout.response_lengths import open_lengths
from schemas.identity import Purpose, trajectory_id
from schemas.records import Prompt

BASE = "768 GPUs train, as in the paper"
FEW = "896 GPUs train: generation limits"


class LongestTrueFirst(WaitingWork):
    """Waiting work whose training group of the largest true mean length comes first."""

    _unordered = False

    def add(self, received: ReceivedRecord) -> None:
        super().add(received)
        self._unordered = True

    def head(self, purpose: Purpose) -> Work | None:
        queue = self._queues["train"]
        if self._unordered and queue and not queue[0].work.member:
            ordered = sorted(queue, key=lambda entry: -_tokens(entry.work.prompt))
            queue.clear()
            queue.extend(ordered)
            self._unordered = False
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
    """A point, the row with which it is compared, and what is taken out of the code while it is predicted."""

    point: Point
    base: str
    without: AbstractContextManager[Any] | None = None

    def predict(self, part: int, seed: int, steps: int) -> Result:
        """Predict it."""
        with self.without or nullcontext():
            return predict(self.point, part, seed, steps)


def variants() -> Iterator[tuple[str, Variant]]:
    """Each row by its name."""
    point = partial(Point, "72B", "large", "laminar")
    yield BASE, Variant(point(), BASE)
    for share in (10 / 16, 11 / 16, 13 / 16):
        yield f"{round(1024 * share)} GPUs train", Variant(point(train_share=share), BASE)
    yield "staleness bound 2", Variant(point(changes=(("experience.max_staleness", 2),)), BASE)
    yield "no repack, no queue balancing", Variant(point(changes=(("placement.repack", False),)), BASE)
    slow = partial(point, train_share=14 / 16)
    yield FEW, Variant(slow(), FEW)
    yield "no KV transfer", Variant(slow(changes=(("rollout.kv_megabytes", 0),)), FEW)
    no_parts = patch.object(repack._Room, "_fit_parts", lambda *load, fullest_first: [])
    yield "each source to one destination", Variant(slow(), FEW, no_parts)
    no_balancing = patch.object(moves, "plan_queue_balancing", lambda *plan, idle_too: [])
    yield "no queue balancing", Variant(slow(), FEW, no_balancing)
    yield "neither repack nor queue balancing", Variant(slow(changes=(("placement.repack", False),)), FEW)
    yield "longest first", Variant(slow(), FEW, patch.object(place_trajectories, "WaitingWork", LongestTrueFirst))
    yield "speculation", Variant(slow(changes=(("rollout.speculation", True),)), FEW)


def main() -> None:
    """Predict and print."""
    options = prediction_arguments(__doc__, 1, "runs/beyond_paper.json").parse_args()
    predictions = {name: (name, variant.predict) for name, variant in variants()}
    rows = predicted_rows(options, predictions, Path(__file__))
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
    bases = {name: variant.base for name, variant in variants()}
    for name, row in rows.items():
        base = rows.get(bases[name], {}).get("tokens_per_s")
        table.add_row(
            name if bases[name] == name else f"  {name}",
            f"{row['tokens_per_s'] / 1000:,.1f}",
            f"{100 * (row['tokens_per_s'] / base - 1):+.1f} %" if base else "",
            *(f"{100 * row[key]:.1f} %" for key in ("kv_use", "rollout_idle", "trainer_idle")),
            f"{row['latency_s']:.0f}",
            f"{row['staleness_mean']:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
