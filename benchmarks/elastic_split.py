"""An elastic split in virtual time: machines move between trainer and rollouts while responses grow longer.

    python -m benchmarks.elastic_split [--machines 8] [--steps 60] [--growth 4] [--static 3 4 5 6] [--json]

Real placement and replicas with emulated engines, of a 32B model on machines of four H800; each machine is a replica or
a fourth of the emulated trainer's 16 GPUs. The median response grows `--growth` times as long over the prompts of the
run, as in the training of a model that learns to reason. Static arms keep the trainer's machines. The elastic arm
decides at each version from what it has measured (`SideWork`): how long the trainer waited, and how full the KV caches
were. A machine that leaves the rollouts hands its work over for up to `--notice` seconds; the trainer stands for
`--reform` seconds when its machines change, and a replica starts after `--start` seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.predicted_departures import Departures
from benchmarks.preemption import EXAMPLE, endless_cluster
from operators.autoscaler.split import SideWork, changed_split, measured_work
from operators.rollout.response_lengths import Lengths, open_lengths
from pipelines.simulate.prediction.world import PredictedWorld
from schemas.identity import parse_trajectory_id

BATCH = 256
BASE = 4
"""Machines of the emulated trainer whose times the configuration has."""
WINDOW = 3
"""Steps over which the work of both sides is measured."""


@dataclass(frozen=True, slots=True)
class Split:
    """One run. Tokens are real ones, times emulated seconds."""

    name: str
    seconds: float
    trained_tokens_per_s: float
    trainer_idle: float
    changes: int
    machines: str
    """Of the trainer: at the begin and after each change."""


def growing(lengths: Lengths, growth: float, prompts: int, most: int) -> Lengths:
    """`lengths` that grow `growth` times as long, exponentially, over so many prompts; at most `most` tokens."""

    def length(seed: int, name: str) -> int:
        share = min(1.0, parse_trajectory_id(name).number / prompts)
        return min(most, max(1, round(lengths(seed, name) * growth**share)))

    return length


class SplitRun:
    """A run on `machines` of which the trainer has `trainer` at first."""

    def __init__(self, options: argparse.Namespace, trainer: int, *, elastic: bool) -> None:
        self._options, self._elastic, self._machines = options, elastic, options.machines
        cluster = endless_cluster(
            EXAMPLE,
            options.seed,
            f"rollout.replicas={options.machines - 1}",
            f"experience.global_batch={BATCH}",
            "placement.admitted_batches=6",
            f"trainer.optimizer_steps={options.steps}",
            "trainer.emulation.step_s=[[0, 5.0], [1_000_000, 46.0]]",
        )
        (task,) = cluster.config.prompts.mixture
        prompts, most = options.steps * BATCH // task.samples_per_prompt, task.max_new_tokens
        lengths = growing(open_lengths(cluster.config.rollout.emulation.lengths), options.growth, prompts, most)
        self._world = PredictedWorld(cluster, lengths, self._at_version)
        self._departures = Departures(self._world)
        self._trainer, self._changed_at = trainer, 0
        self._leaving: set[int] = set()
        self.history = [trainer]
        self._world.training.speed = trainer / BASE
        self._world.scheduler.at(0.0, self._begin)

    def run(self, name: str) -> Split:
        """Run to the end."""
        found = self._world.run().prediction()
        last = self._world.training.steps[-1].ends
        return Split(
            name,
            last,
            found.trained_tokens_per_s,
            found.trainer_idle,
            len(self.history) - 1,
            " → ".join(map(str, self.history)),
        )

    def _begin(self) -> None:
        for index in range(self._machines - self._trainer, self._machines - 1):
            self._departures.leave(index, 0.0, math.inf)

    def _at_version(self, number: int) -> None:
        if self._leaving and not any(self._world.replicas[index].alive for index in self._leaving):
            self._leaving.clear()
            self._form(self._trainer)
        if not self._elastic or self._leaving or number - self._changed_at < WINDOW + 1:
            return
        wanted = changed_split(self._work(), self._trainer, self._machines, range(1, self._machines))
        if wanted == self._trainer:
            return
        before, self._trainer, self._changed_at = self._machines - self._trainer, wanted, number
        after = self._machines - wanted
        self.history.append(wanted)
        if after < before:
            self._leaving = set(range(after, before))
            for index in self._leaving:
                self._departures.leave(index, self._options.notice, math.inf)
            return
        self._form(wanted)
        for index in range(before, after):
            self._world.scheduler.after(self._options.start, lambda index=index: self._world.start(index))  # type: ignore[misc]

    def _form(self, trainer: int) -> None:
        """Go on with so many machines of the trainer."""
        self._world.training.speed = trainer / BASE
        self._world.training.pause(self._options.reform)

    def _work(self) -> SideWork:
        """What the last steps have taken of both sides."""
        steps = self._world.training.steps[-WINDOW:]
        begin, end = steps[0].begins - steps[0].waited, steps[-1].ends
        seconds = (end - begin) / len(steps)
        busy = sum(step.ends - step.begins for step in steps) / len(steps)
        uses = [use for beats in self._world.measurement.beats.values() for at, use, *_ in beats if begin <= at <= end]
        use = float(np.mean(uses)) if uses else None
        return measured_work(self._trainer, self._machines - self._trainer, seconds, 1 - busy / seconds, use)


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--machines", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--growth", type=float, default=4.0)
    arguments.add_argument("--static", type=int, nargs="+", default=[3, 4, 5, 6])
    arguments.add_argument("--begin", type=int, default=5, help="machines of the elastic arm's trainer at first")
    arguments.add_argument("--notice", type=float, default=30.0)
    arguments.add_argument("--reform", type=float, default=15.0)
    arguments.add_argument("--start", type=float, default=15.0)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    arms = [(f"{count} for the trainer", count, False) for count in options.static] + [("elastic", options.begin, True)]
    found = []
    for name, count, elastic in arms:
        found.append(SplitRun(options, count, elastic=elastic).run(name))
        sys.stderr.write(f"{name}: {found[-1].seconds:,.0f} s\n")
    if options.json:
        print(json.dumps([asdict(each) for each in found]))
    else:
        Console(width=120).print(_table(found, f"{options.machines} machines, {options.steps} steps"))


def _table(found: Sequence[Split], title: str) -> Table:
    table = Table(title=title)
    for column in ("split", "seconds", "of the best static", "trained tokens/s", "trainer idle", "trainer's machines"):
        table.add_column(column, justify="right")
    best = min(each.seconds for each in found if each.name != "elastic")
    for each in found:
        figures = f"{each.seconds:,.0f}", f"{each.seconds / best:.2f}", f"{each.trained_tokens_per_s:,.0f}"
        table.add_row(each.name, *figures, f"{each.trainer_idle:.0%}", each.machines)
    return table


if __name__ == "__main__":
    main()
