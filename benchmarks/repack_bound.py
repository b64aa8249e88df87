"""The upper bound of repack's gain: the same schedulers and lengths, with placement that costs nothing.

    python benchmarks/repack_bound.py [--replicas 16] [--batch 512] [--hours 2] [--json]

Each replica takes a batch of trajectories, drains it under one weight version, and takes the next batch. A new version
follows every `--global-batch` finished trajectories. Three placements are compared on emulated engines with a simulated
clock and without Kafka: `none`; `repack`, placement's plan every five seconds, whose moves cost the prefill of moved
tokens; and `oracle`, which every second packs the remaining trajectories of each version onto as few replicas as can
hold them, at no cost. Figures are of the second half of the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import numpy as np
from rich.console import Console
from rich.table import Table

from operators.placement.length_statistics import LengthStatistics
from operators.placement.queue_balancing import plan_queue_balancing
from operators.placement.repack import KVLoad, plan_repack
from operators.rollout.emulated_engine import EmulatedEngine, emulated_scheduling
from operators.rollout.emulated_rows import EmulatedRows
from operators.rollout.emulation_config import DEFAULT_CONTEXT, EngineEmulation, LengthsConfig, RooflineConfig
from operators.rollout.engine import Request
from operators.rollout.response_lengths import open_lengths
from operators.rollout.roofline import Roofline
from schemas.records import PolicyVersion, Sampling

TICK_S = 1.0
REPACK_S = 5.0
END = 0


@dataclass(frozen=True)
class Cluster:
    """Sizes in real tokens and seconds; one emulated token stands for `stride` real ones."""

    replicas: int = 16
    batch: int = 512
    """Trajectories that a replica takes at a time, and its maximum."""
    kv_tokens: int = 820_000
    prompt: int = 2048
    p50: float = 2000.0
    p99: float = 16_000.0
    most_requests: int = 160
    """Maximum requests of a replica after moves."""
    pull_s: float = 0.57
    global_batch: int = 8192
    stride: int = 8
    seed: int = 0


@dataclass
class Figures:
    """The measurements of a placement, in the second half of its time."""

    tokens_per_s: float
    kv_use: float
    latency_s: float
    moved: int
    versions: int


class FreeRows(EmulatedRows):
    """Rows that resume at once: no prefill and no wait for KV."""

    def prefill_tokens(self, request: Request) -> int:
        return 0 if request.partial is not None else super().prefill_tokens(request)

    def provided_kv_tokens(self, request: Request) -> int:
        return 0


class FreeEngine(EmulatedEngine):
    """An engine with such rows."""

    _rows = FreeRows


@dataclass
class SimulatedReplica:
    """An engine, and the requests of its version with the time at which each began."""

    engine: EmulatedEngine
    version: int = -1
    requests: dict[str, tuple[Request, float]] = field(default_factory=dict)
    kv_before: int = 0


class Simulation:
    """One placement on one cluster."""

    def __init__(self, cluster: Cluster, free: bool) -> None:
        self.cluster, self.now = cluster, 0.0
        self._placed = 0.0
        self._next = self.finished = self.moved = 0
        self.lengths = LengthStatistics()
        self._latencies: list[tuple[float, float]] = []
        self._kv: list[tuple[float, float]] = []
        self._tokens: list[tuple[float, int]] = []
        self.replicas = [SimulatedReplica(self._engine(free)) for _ in range(cluster.replicas)]

    def run(self, seconds: float, place: Callable[[Simulation], None], every_s: float) -> Figures:
        """Simulate `seconds`, calling `place` every `every_s` seconds."""
        # Different versions: in a steady state replicas start at different times.
        for index, replica in enumerate(self.replicas):
            replica.version = -2 - index
        while self.now < seconds:
            self._tick(place, every_s)
        return self._figures(seconds / 2)

    @property
    def has_work(self) -> bool:
        """Whether a replica that has nothing to do can take another batch."""
        return True

    def move(self, source: SimulatedReplica, names: list[str], destination: SimulatedReplica) -> None:
        """Move the requests `names` with their tokens, shortest first."""
        released = source.engine.release(names, with_kv=True)
        for name, partial in sorted(released.items(), key=lambda each: len(each[1].token_ids)):
            request, began = source.requests.pop(name)
            resumed = Request(name, request.prompt, request.sampling, partial if len(partial.token_ids) else None)
            destination.engine.submit(resumed)
            destination.requests[name] = request, began
            self.moved += 1

    def _tick(self, place: Callable[[Simulation], None], every_s: float) -> None:
        self.now += TICK_S
        for replica in self.replicas:
            self._step(replica)
        if self.now - self._placed >= every_s:
            self._placed = self.now
            place(self)
            for replica in self.replicas:
                replica.kv_before = replica.engine.status().kv_used
        for index, replica in enumerate(self.replicas):
            if not replica.requests and self.has_work and self.now >= 20.0 * index:
                self._begin(replica)
        self._measure()

    def _engine(self, free: bool) -> EmulatedEngine:
        cluster, stride = self.cluster, self.cluster.stride
        emulation = EngineEmulation(stride=stride)
        config = emulated_scheduling(cluster.batch, DEFAULT_CONTEXT // stride, cluster.kv_tokens // stride, emulation)
        lengths = open_lengths(LengthsConfig(cluster.p50 / stride, cluster.p99 / stride))
        kind = FreeEngine if free else EmulatedEngine
        return kind(config, Roofline(RooflineConfig(), stride), lengths, pull_s=cluster.pull_s, clock=lambda: self.now)

    def _begin(self, replica: SimulatedReplica) -> None:
        cluster = self.cluster
        replica.version = self.finished // cluster.global_batch
        replica.engine.load(None, PolicyVersion(1, replica.version))  # type: ignore[arg-type]
        most = (DEFAULT_CONTEXT - cluster.prompt) // cluster.stride
        sampling = Sampling(1.0, 1.0, 0, most, (END,), cluster.seed)
        for name, token in self._batch():
            request = Request(name, np.full(cluster.prompt // cluster.stride, 1 + token, np.int32), sampling)
            replica.engine.submit(request)
            replica.requests[name] = request, self.now

    def _batch(self) -> Iterator[tuple[str, int]]:
        """The names of a batch's requests, each with a number of its prompt."""
        for _ in range(self.cluster.batch):
            group, member = divmod(self._next, 16)
            self._next += 1
            yield f"p{group}.{member}", group % 30_000

    def _step(self, replica: SimulatedReplica) -> None:
        for done in replica.engine.step():
            request, began = replica.requests.pop(done.trajectory_id)
            self.lengths.add(len(request.prompt), len(done.generated.token_ids))
            self.finished += 1
            self._latencies.append((self.now, self.now - began))

    def _measure(self) -> None:
        loads = [replica.engine.status() for replica in self.replicas]
        self._kv.append((self.now, statistics.fmean(load.kv_used / load.kv_capacity for load in loads)))
        self._tokens.append((self.now, sum(load.tokens_generated for load in loads)))

    def _figures(self, since: float) -> Figures:
        (begin, before), (end, after) = next(each for each in self._tokens if each[0] >= since), self._tokens[-1]
        return Figures(
            tokens_per_s=(after - before) * self.cluster.stride / (end - begin),
            kv_use=statistics.fmean(use for at, use in self._kv if at >= since),
            latency_s=statistics.fmean(latency for at, latency in self._latencies if at >= since),
            moved=self.moved,
            versions=self.finished // self.cluster.global_batch,
        )


def no_moves(simulation: Simulation) -> None:
    """No moves: every replica drains its own requests."""


def repack(simulation: Simulation) -> None:
    """Moves of placement's plan, which cost the engines a prefill."""
    lengths = simulation.lengths
    for version in {replica.version for replica in simulation.replicas}:
        group = {i: r for i, r in enumerate(simulation.replicas) if r.version == version and r.requests}
        loads = []
        for index, replica in group.items():
            status, requests = replica.engine.status(), len(replica.requests)
            loads.append(
                KVLoad(
                    replica=index,
                    kv_used=status.kv_used,
                    kv_capacity=status.kv_capacity,
                    kv_before=replica.kv_before,
                    requests=requests,
                    waiting=status.waiting,
                    most_requests=simulation.cluster.most_requests,
                    growth=int(lengths.growth(status.kv_used / max(1, status.running), requests)),
                )
            )
        moves = plan_repack(loads)
        for move in [*moves, *plan_queue_balancing(loads, moves, max(1, int(lengths.kv())))]:
            source = group[move.source]
            names = list(source.requests)
            taken = names[-move.requests :] if move.waiting else names[: move.requests]
            simulation.move(source, taken, group[move.destination])


def oracle(simulation: Simulation) -> None:
    """Pack the remaining requests of each version onto as few replicas as can hold them, the fullest ones."""
    for version in {replica.version for replica in simulation.replicas}:
        idle = [r for r in simulation.replicas if r.version == version and r.requests and not r.engine.status().waiting]
        idle.sort(key=lambda replica: replica.engine.status().kv_used)
        while len(idle) > 1:
            source, *others = idle
            loads = [replica.engine.status() for replica in idle]
            room = sum(load.kv_capacity - load.kv_used for load in loads[1:])
            free = sum(simulation.cluster.batch - load.running for load in loads[1:])
            if loads[0].kv_used > room - 16 * len(source.requests) or loads[0].running > free:
                break
            _spread(simulation, source, others[::-1])
            idle = others


def _spread(simulation: Simulation, source: SimulatedReplica, others: list[SimulatedReplica]) -> None:
    """Move all requests of `source` to `others`, as many to each as fit."""
    each = source.engine.status().kv_used // max(1, len(source.requests)) + 16
    for destination in others:
        load = destination.engine.status()
        count = min((load.kv_capacity - load.kv_used) // each, simulation.cluster.batch - len(destination.requests))
        if count > 0:
            simulation.move(source, list(source.requests)[:count], destination)
    if source.requests:
        simulation.move(source, list(source.requests), others[-1])


PLACEMENTS: dict[str, tuple[Callable[[Simulation], None], float, bool]] = {
    "none": (no_moves, REPACK_S, False),
    "repack": (repack, REPACK_S, False),
    "oracle": (oracle, TICK_S, True),
}


def main() -> None:
    """Simulate and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--replicas", type=int, default=Cluster.replicas)
    arguments.add_argument("--batch", type=int, default=Cluster.batch)
    arguments.add_argument("--prompt", type=int, default=Cluster.prompt)
    arguments.add_argument("--p50", type=float, default=Cluster.p50)
    arguments.add_argument("--p99", type=float, default=Cluster.p99)
    arguments.add_argument("--global-batch", type=int, default=Cluster.global_batch)
    arguments.add_argument("--hours", type=float, default=2.0)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--placements", nargs="+", default=list(PLACEMENTS), choices=list(PLACEMENTS))
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    sizes = ("replicas", "batch", "prompt", "p50", "p99", "global_batch", "seed")
    cluster = Cluster(**{name: getattr(options, name) for name in sizes})
    found: dict[str, Figures] = {}
    seconds: dict[str, float] = {}
    for name in options.placements:
        place, every_s, free = PLACEMENTS[name]
        started = time.process_time()
        found[name] = Simulation(cluster, free).run(options.hours * 3600, place, every_s)
        seconds[name] = time.process_time() - started
    if options.json:
        print(json.dumps({"cluster": asdict(cluster)} | {name: asdict(each) for name, each in found.items()}))
        return
    table = Table(
        title=f"{cluster.replicas} replicas, batches of {cluster.batch}, p99/p50 {cluster.p99 / cluster.p50:g}"
    )
    for column in ("placement", "tokens/s", "gain", "mean KV use", "mean latency s", "moved", "versions", "CPU s"):
        table.add_column(column, justify="left" if column == "placement" else "right")
    base = next(iter(found.values()))
    for name, each in found.items():
        table.add_row(
            name,
            f"{each.tokens_per_s:,.0f}",
            f"{100 * (each.tokens_per_s / base.tokens_per_s - 1):+.1f} %",
            f"{100 * each.kv_use:.1f} %",
            f"{each.latency_s:.0f}",
            f"{each.moved}",
            f"{each.versions}",
            f"{seconds[name]:.1f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
