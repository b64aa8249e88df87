"""Longest first by predicted lengths: makespan and moves beside log order, with and without repack, by simulation.

    python -m benchmarks.length_prediction [--recorded FILE] [--shares 0.5 0.9] [--seeds 0 1] [--json]

The cluster is that of benchmarks/repack_bound.py, with fewer replicas: each takes a batch of the next groups of a data
set that is read `epochs` times, and drains it. Its groups begin in log order (as with one mean for all), longest first
by the lengths of earlier epochs, or longest first by each prompt's true mean; `spread` takes every second group of
twice as many, by rank of the expected length, so that no replica gets all long ones. Lengths are lognormal with a share
of the variance of their logarithms between prompts, or recorded: a file of `benchmarks.speculation --lengths`, times
32. `--placement` predicts the same with placement's own code in virtual time (`laminar simulate`), longest first by
true means: the most that any prediction could gain.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.expected_lengths import length_prior, longest_first
from benchmarks.repack import EXAMPLE, changes
from benchmarks.repack_bound import REPACK_S, Cluster, SimulatedReplica, Simulation, no_moves, repack
from operators.placement import place_trajectories
from operators.placement.waiting_work import WaitingWork
from operators.placement.work_table import Work
from operators.rollout.emulated_engine import EmulatedEngine
from operators.rollout.emulation_config import DEFAULT_CONTEXT
from pipelines.config import load_config
from pipelines.simulate.prediction.cluster import Cluster as PredictedCluster
from pipelines.simulate.prediction.measurement import Prediction
from pipelines.simulate.prediction.world import PredictedWorld
from schemas.identity import Purpose, parse_trajectory_id

CLUSTER = Cluster(replicas=8, batch=256, kv_tokens=410_000, most_requests=96, global_batch=2048)
GROUP = 16
STRIDE = 32
"""Tokens for each token of a recorded length."""
ORDERS = ("log order", "longest first", "longest first, spread", "longest first, true means")
PLACEMENTS: Mapping[str, Callable[[Simulation], None]] = {"none": no_moves, "repack": repack}


@dataclass(frozen=True)
class DataSet:
    """Response lengths in emulated tokens, int64[epochs, prompts, GROUP]."""

    lengths: np.ndarray

    @classmethod
    def drawn(cls, share: float, epochs: int, prompts: int, seed: int) -> DataSet:
        """Lognormal lengths with the median and p99 of the cluster."""
        rng = np.random.default_rng(seed)
        sigma = math.log(CLUSTER.p99 / CLUSTER.p50) / statistics.NormalDist().inv_cdf(0.99)
        between = rng.normal(0, sigma * share**0.5, (1, prompts, 1))
        within = rng.normal(0, sigma * (1 - share) ** 0.5, (epochs, prompts, GROUP))
        most = DEFAULT_CONTEXT - CLUSTER.prompt
        lengths = np.clip(np.exp(between + within) * CLUSTER.p50, 1, most)
        return cls(np.maximum(1, lengths / CLUSTER.stride).astype(np.int64))

    @classmethod
    def recorded(cls, file: Path, epochs: int, prompts: int, seed: int) -> DataSet:
        """Prompts drawn from those of `file`, and for each response one of the prompt's recorded lengths."""
        found: dict[str, list[int]] = {}
        for line in file.read_text("utf-8").splitlines():
            row = json.loads(line)
            found.setdefault(row["prompt"], []).append(row["length"])
        rng, names = np.random.default_rng(seed), sorted(found)
        chosen = rng.choice(len(names), prompts)
        drawn = [[rng.choice(found[names[each]], GROUP) for each in chosen] for _ in range(epochs)]
        return cls(np.maximum(1, np.array(drawn) * STRIDE // CLUSTER.stride))


class OrderedSimulation(Simulation):
    """A run over `data`, whose replicas begin the groups of their batches in `order`."""

    def __init__(self, data: DataSet, order: str, seed: int) -> None:
        self.data, self.order = data, order
        epochs, prompts, _ = data.lengths.shape
        rng = np.random.default_rng(seed)
        self.left = [(epoch, int(prompt)) for epoch in range(epochs) for prompt in rng.permutation(prompts)]
        self.history: dict[int, list[int]] = {}
        self.total, self._begun = data.lengths.size, (1.0, 0)
        super().__init__(CLUSTER, free=False)

    def makespan(self, place: Callable[[Simulation], None]) -> float:
        """Simulate until all has finished; emulated seconds."""
        while self.finished < self.total:
            self._tick(place, REPACK_S)
        return self.now

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def rate(self) -> float:
        """Emulated tokens per second until the last batch began: without the last drain."""
        return self._begun[1] / self._begun[0]

    def _engine(self, free: bool) -> EmulatedEngine:
        engine = super()._engine(free)
        engine._scheduler.rows._lengths = lambda seed, name: int(self.data.lengths[tuple(map(int, name.split(".")))])
        return engine

    def _begin(self, replica: SimulatedReplica) -> None:
        super()._begin(replica)
        if not self.left:
            self._begun = (self.now, sum(each.engine.status().tokens_generated for each in self.replicas))

    def _batch(self) -> Iterator[tuple[str, int]]:
        groups = self._next_groups(self.cluster.batch // GROUP)
        return ((f"{epoch}.{prompt}.{member}", prompt) for epoch, prompt in groups for member in range(GROUP))

    def _next_groups(self, count: int) -> list[tuple[int, int]]:
        if self.order == "log order":
            chosen, self.left = self.left[:count], self.left[count:]
            return chosen
        spread = self.order == "longest first, spread"
        window = self.left[: 2 * count if spread else count]
        ranked = [window[number] for number in self._longest_first(window)]
        chosen = ranked[::2] if spread and len(window) > count else ranked
        taken = set(chosen)
        self.left = [each for each in self.left if each not in taken]
        return chosen

    def _longest_first(self, groups: Sequence[tuple[int, int]]) -> list[int]:
        if self.order == "longest first, true means":
            means = self.data.lengths.mean((0, 2))
            return sorted(range(len(groups)), key=lambda number: -means[groups[number][1]])
        prior = length_prior(self.history.values())
        return longest_first([self.history.get(prompt, ()) for _, prompt in groups], prior)

    def _step(self, replica: SimulatedReplica) -> None:
        count, before = self.finished, list(replica.requests)
        super()._step(replica)
        for name in before if self.finished > count else ():
            if name not in replica.requests:
                epoch, prompt, member = map(int, name.split("."))
                self.history.setdefault(prompt, []).append(int(self.data.lengths[epoch, prompt, member]))


@dataclass(frozen=True)
class Found:
    """One simulated run: emulated seconds, mean tokens per second until the last batch began, and moved requests."""

    makespan_s: float
    tokens_per_s: float
    latency_s: float
    moved: int


def simulate(data: DataSet, order: str, placement: str, seed: int) -> Found:
    """Run `data` once."""
    simulation = OrderedSimulation(data, order, seed)
    makespan = simulation.makespan(PLACEMENTS[placement])
    latency = statistics.fmean(latency for _, latency in simulation._latencies)
    return Found(makespan, simulation.rate() * CLUSTER.stride, latency, simulation.moved)


class LongestFirst(WaitingWork):
    """Waiting work whose longest training group comes first, by `means` of the emulated lengths of each prompt."""

    means: np.ndarray

    def head(self, purpose: Purpose) -> Work | None:
        queue = self._queues[purpose]
        if purpose == "train" and queue and not queue[0].work.member:
            ordered = sorted(queue, key=lambda entry: -self.means[entry.work.prompt.number % len(self.means)])
            queue.clear()
            queue.extend(ordered)
        return super().head(purpose)


def cluster_changes(repack: bool, time_scale: float, steps: int, seed: int) -> list[str]:
    """The changes to the example for a run of CLUSTER."""
    shape = {"replicas": CLUSTER.replicas, "time_scale": time_scale, "stride": CLUSTER.stride, "shorter": 1}
    settings = changes(repack, argparse.Namespace(**shape, steps=steps, seed=seed))
    sizes = [f"rollout.slots={CLUSTER.batch}", f"experience.global_batch={CLUSTER.global_batch}"]
    sizes += [f"rollout.kv_capacity={CLUSTER.kv_tokens // CLUSTER.stride}"]
    return [*settings, *sizes, f"placement.repack_requests={CLUSTER.most_requests}"]


def predict(data: DataSet, longest_first: bool, repack: bool, seed: int) -> Prediction:
    """The run of benchmarks/repack.py with the prompts of `data`, by placement's own code in virtual time."""
    config = load_config(EXAMPLE, [*cluster_changes(repack, 1.0, 5, seed), "rollout.heartbeat_s=1.0"])
    LongestFirst.means = data.lengths.mean((0, 2))
    kind = place_trajectories.WaitingWork
    place_trajectories.WaitingWork = LongestFirst if longest_first else WaitingWork  # type: ignore[misc]
    try:
        world = PredictedWorld(PredictedCluster(config))
    finally:
        place_trajectories.WaitingWork = kind  # type: ignore[misc]
    epochs, prompts, members = data.lengths.shape

    def length(seed: int, name: str) -> int:
        key = parse_trajectory_id(name)
        return int(data.lengths[key.number // prompts % epochs, key.number % prompts, key.member % members])

    world._lengths = length
    return world.run().prediction()


def print_predictions(sources: Mapping[str, Callable[[int], DataSet]], seeds: Sequence[int]) -> None:
    """The table of `--placement`."""
    table = Table(title=f"Placement in virtual time, {CLUSTER.replicas} replicas, means of {len(seeds)} seeds")
    for column in ("lengths", "moves, order", "seconds", "tokens/s", "mean latency s", "staleness", "moved"):
        table.add_column(column, justify="left" if column in ("lengths", "moves, order") else "right")
    for name, source in sources.items():
        for moving in (False, True):
            for first in (False, True):
                runs = [predict(source(seed), first, moving, seed) for seed in seeds]
                fields = ("seconds", "generated_tokens_per_s", "latency_s", "staleness_mean", "moved")
                means = [statistics.fmean(getattr(run, field) for run in runs) for field in fields]
                order = f"{'repack' if moving else 'none'}, {ORDERS[3 * first]}"
                table.add_row(name, order, *(f"{mean:,.2f}" if mean < 100 else f"{mean:,.0f}" for mean in means))
    Console(width=130).print(table)


def main() -> None:
    """Simulate and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--recorded", type=Path, help="recorded lengths")
    arguments.add_argument("--shares", type=float, nargs="*", default=[0.5, 0.9])
    arguments.add_argument("--epochs", type=int, default=3)
    arguments.add_argument("--prompts", type=int, default=256)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments.add_argument("--placement", action="store_true", help="predict with placement's own code")
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    sources: dict[str, Callable[[int], DataSet]] = {
        f"{100 * share:.0f} % between prompts": partial(DataSet.drawn, share, options.epochs, options.prompts)
        for share in options.shares
    }
    if options.recorded:
        sources["recorded"] = partial(DataSet.recorded, options.recorded, options.epochs, options.prompts)
    if options.placement:
        print_predictions(sources, options.seeds)
        return
    found: dict[str, dict[str, Found]] = {}
    for name, source in sources.items():
        for placement in PLACEMENTS:
            for order in ORDERS:
                runs = [simulate(source(seed), order, placement, seed) for seed in options.seeds]
                found.setdefault(name, {})[f"{placement}, {order}"] = _mean(runs)
    if options.json:
        print(json.dumps({name: {key: asdict(each) for key, each in runs.items()} for name, runs in found.items()}))
        return
    console = Console(width=130)
    for name, runs in found.items():
        console.print(_table(name, runs, options))


def _mean(runs: Sequence[Found]) -> Found:
    columns = zip(*(astuple(each) for each in runs), strict=True)
    return Found(*(statistics.fmean(column) for column in columns))  # type: ignore[arg-type]


def _table(name: str, runs: Mapping[str, Found], options: argparse.Namespace) -> Table:
    what = f"{CLUSTER.replicas} replicas, batches of {CLUSTER.batch}, {options.prompts} prompts of {GROUP} samples"
    table = Table(title=f"{name}: {what}, {options.epochs} epochs, {len(options.seeds)} seeds")
    for column in ("moves, order", "makespan s", "gain", "tokens/s", "gain", "mean latency s", "moved"):
        table.add_column(column, justify="left" if column == "moves, order" else "right")
    base = next(iter(runs.values()))
    for key, each in runs.items():
        gains = base.makespan_s / each.makespan_s, each.tokens_per_s / base.tokens_per_s
        shown = [f"{100 * (gain - 1):+.1f} %" for gain in gains]
        rate, latency = f"{each.tokens_per_s:,.0f}", f"{each.latency_s:.0f}"
        table.add_row(key, f"{each.makespan_s:,.0f}", shown[0], rate, shown[1], latency, f"{each.moved:,.0f}")
    return table


if __name__ == "__main__":
    main()
