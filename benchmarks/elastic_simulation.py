"""Scaling up 8 to 128 nodes under a burst of requests, by four ways to load the model, without sockets.

    python -m benchmarks.elastic_simulation [--nodes 8 32 128] [--gigabytes-per-s 18] [--sources 4] [--delay 1] [--json]

At time 0 all nodes but the sources begin to load, and a burst begins: Poisson arrivals for `--burst` seconds that would
take `--load` of the nodes' capacity. Sources serve nobody. A node serves when it has the model, and as a stage before:

staged    k-way binomial transfer in the product's order (chunk_orders); the i-th joining nodes of the groups form the
          product's pipelines (plan_pipelines) `--delay` seconds after they cover the model
full      the same transfer, without stages
tree      FaaSNet-like: each source feeds a balanced binary tree of nodes, which forward block by block
nccl      NCCL-like: a chain from each source, `--init` seconds after the communicators' initialization

The requests are work of equal size that any node takes from one queue. A stage has PIPELINED of a node's capacity: with
four sources of `benchmarks.elastic` the burst took four whole machines 3.6 s from the first token on, and four stages
7.8 s. GPU-seconds: those of all joining nodes until the last request.
The default rate is that of λScale's 70B to 8 nodes: 140 GB in 9.27 s, 16 + 3 steps of a 16th (2502.09922).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.relay_simulation import arrivals
from infra.store.model_parts import ModelParts, chunk_orders
from infra.transport.schedules import SCHEDULES, TransferStep
from operators.placement.stage_groups import plan_pipelines

BLOCKS, STARTUP_S, POINTS = 256, 50e-6, 24
PIPELINED = 0.46
ARMS = ("staged", "full", "tree", "nccl")


@dataclass(frozen=True)
class Model:
    """A model in bfloat16, and its requests of 512 tokens, which get 128 in batches of 32 on H100s at 40 % of peak."""

    name: str
    layers: int
    gigabytes: float
    ends: float
    """The share of the tensors outside of layers."""
    prefill_s: float
    request_s: float
    gpus: int
    """Of a node."""

    @property
    def parts(self) -> ModelParts:
        """The blocks of its parts."""
        bounds = np.linspace(self.ends, 1.0, self.layers + 1) * BLOCKS
        layers = [range(int(first), int(np.ceil(end))) for first, end in pairwise(bounds)]
        return ModelParts(frozenset(range(int(np.ceil(bounds[0])))), tuple(map(frozenset, layers)))


MODELS = (
    Model("7B", 32, 13.5, 0.04, 0.018, 0.035, 1),
    Model("13B", 40, 26.0, 0.025, 0.033, 0.064, 1),
    Model("70B", 80, 138.0, 0.008, 0.045, 0.086, 4),
)


@dataclass(frozen=True)
class Burst:
    """The requests of a burst and the rest of the setting."""

    sources: int
    seconds: float
    load: float
    delay_s: float
    init_s: float


@dataclass(frozen=True)
class Result:
    """One arm. `whole_s` is when the last node has the model."""

    arm: str
    whole_s: float
    first_s: float
    ttft_p50: float
    ttft_p99: float
    gpu_seconds: float


def binary_tree(nodes: int, blocks: int) -> Iterator[TransferStep]:
    """Node i forwards each block to nodes 2i + 1 and 2i + 2."""
    levels = [np.arange((1 << level) - 1, min((2 << level) - 1, nodes)) for level in range(nodes.bit_length())]
    for block in range(blocks):
        for level in levels:
            for side in (1, 2):
                sources = level[2 * level + side < nodes]
                if len(sources):
                    yield TransferStep(sources, 2 * sources + side, np.full(len(sources), block))


def simulate(model: Model, nodes: int, rate: float, burst: Burst, arm: str) -> Result:
    """One scale-up from `burst.sources` nodes to `nodes`, over links of `rate` bytes/s in each direction."""
    block_s = model.gigabytes * 1e9 / BLOCKS / rate + STARTUP_S
    schedule = {"tree": binary_tree, "nccl": SCHEDULES["chain"]}.get(arm, SCHEDULES["binomial"])
    orders = chunk_orders(model.parts, BLOCKS, burst.sources)
    joined = []
    for group in range(burst.sources):
        size = len(range(group, nodes, burst.sources))
        found = arrivals(schedule(size, BLOCKS), 1, size, BLOCKS, block_s)[1:]
        at = np.empty_like(found)
        at[:, orders[group]] = found
        joined.append(at + (burst.init_s if arm == "nccl" else 0.0))
    whole = np.sort(np.concatenate([at.max(axis=1) for at in joined]))
    times, capacity = whole, np.arange(1.0, len(whole) + 1)
    if arm == "staged":
        times = np.unique(np.concatenate([np.linspace(0, whole[0], POINTS), whole]))
        capacity = np.array([_capacity(model, joined, now, burst.delay_s) for now in times])
    return _serve(model, burst, arm, times, capacity, len(whole))


def _capacity(model: Model, joined: Sequence[np.ndarray], now: float, delay_s: float) -> float:
    """The nodes that serve at `now`: whole ones, and those in pipelines at their share."""
    parts, total = model.parts, 0.0
    for place in range(max(map(len, joined))):
        column = [at[place] for at in joined if place < len(at)]
        total += sum(bool(at.max() <= now) for at in column)
        loading = {number: at for number, at in enumerate(column) if at.max() > now}
        held = {number: parts.held(np.flatnonzero(at <= now - delay_s).tolist()) for number, at in loading.items()}
        total += PIPELINED * sum(map(len, plan_pipelines(held, model.layers)))
    return total


def _serve(model: Model, burst: Burst, arm: str, times: np.ndarray, capacity: np.ndarray, nodes: int) -> Result:
    """Serve the burst by `capacity` nodes from each of `times` on; the last is all of them."""
    count = int(burst.load * nodes * burst.seconds / model.request_s)
    arrived = np.sort(np.random.default_rng(0).uniform(0.0, burst.seconds, count))
    end = times[-1] + burst.seconds + 2 * count * model.request_s / nodes
    grid = np.concatenate([[0.0], times, [end]])
    work = np.concatenate([[0.0], np.cumsum(np.diff(grid) * np.concatenate([[0.0], capacity]))])
    before = np.arange(count) * model.request_s
    begun = np.maximum.accumulate(np.interp(arrived, grid, work) - before) + before  # in work done until then
    serving = work > 0
    inverse = np.concatenate([[0.0], work[serving]]), np.concatenate([[grid[~serving][-1]], grid[serving]])
    begins = np.maximum(arrived, np.interp(begun, *inverse))
    first = begins - arrived + model.prefill_s
    done = float(np.interp(begun[-1] + model.request_s, *inverse))
    p50, p99 = np.quantile(first, [0.5, 0.99])
    return Result(arm, float(times[-1]), float(inverse[1][0]), float(p50), float(p99), nodes * done * model.gpus)


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--gigabytes-per-s", type=float, default=18.0, help="rate of a node's link, per direction")
    parser.add_argument("--sources", type=int, default=4)
    parser.add_argument("--burst", type=float, default=10.0, help="seconds of arrivals")
    parser.add_argument("--load", type=float, default=0.5, help="share of the joining nodes' capacity")
    parser.add_argument("--delay", type=float, default=1.0, help="seconds from covering the model to serving in stages")
    parser.add_argument("--init", type=float, default=0.3, help="seconds to initialize NCCL's communicators")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    burst = Burst(options.sources, options.burst, options.load, options.delay, options.init)
    rate = options.gigabytes_per_s * 1e9
    rows = [
        (model, nodes, [simulate(model, nodes, rate, burst, arm) for arm in ARMS])
        for model in MODELS
        for nodes in options.nodes
    ]
    if options.json:
        print(json.dumps([{"model": m.name, "nodes": n, "arms": [asdict(r) for r in found]} for m, n, found in rows]))
        return
    table = Table(title=f"p99 of the first token, s (GPU-seconds): {options.gigabytes_per_s:g} GB/s")
    for name in ("model", "nodes", "whole", *ARMS):
        table.add_column(name, justify="right")
    for model, nodes, found in rows:
        cells = (f"{each.ttft_p99:.2f} ({each.gpu_seconds:.0f})" for each in found)
        table.add_row(model.name, str(nodes), f"{found[0].whole_s:.2f} s", *cells)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
