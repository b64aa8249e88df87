"""Simulated time for a version to reach 4 to 4,096 relays, with the schedules of the relays, without sockets.

    python benchmarks/relay_simulation.py

A transfer of the schedule (`infra/transport/schedules.py`) starts once its source has the block and the links of both
ends are free in that direction. It takes the block's bytes over the link's rate plus the start-up time. Defaults are
the paper's (Laminar, 2510.12633): 72B in bfloat16, 100 GB/s, 5 µs, chunks of 32 MB. "formula" is the paper's cost model
at the best number of chunks; "paper" is its measurement (from v1's figure: RDMA, 8 x 400 Gb/s per machine). k-way: k
relays have the version and the others join (λScale, 2502.09922); "first copy" is when the joining relays together have
every block.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from infra.transport.schedules import SCHEDULES, TransferStep, k_way

PAPER_S = {4: 0.95, 8: 1.11, 16: 1.24, 32: 1.38, 64: 1.51, 128: 1.63}
COLUMNS = ("relays", "formula", "chain", "binomial", "k", "k-way", "first_copy", "paper")


class Arrived(NamedTuple):
    """Seconds until the last relay has every block, and until the joining relays together have every block."""

    everywhere: float
    first_copy: float


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--relays", type=int, nargs="+", default=[1 << power for power in range(2, 13)])
    parser.add_argument("--gigabytes", type=float, default=144.0, help="size of a version, 10^9 bytes")
    parser.add_argument("--chunk-megabytes", type=float, default=32.0, help="size of a chunk, 10^6 bytes")
    parser.add_argument("--gigabytes-per-s", type=float, default=100.0, help="rate of a link, per direction")
    parser.add_argument("--startup-us", type=float, default=5.0, help="start-up time of each chunk on each hop")
    parser.add_argument("--sources", type=int, default=4, help="relays that have the version, for k-way")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    size, rate, startup = options.gigabytes * 1e9, options.gigabytes_per_s * 1e9, options.startup_us * 1e-6
    blocks = math.ceil(size / (options.chunk_megabytes * 1e6))
    block_s = size / blocks / rate + startup
    rows = [row_of(relays, blocks, block_s, size / rate, startup, options.sources) for relays in options.relays]
    first, last = rows[0], next((row for row in rows if row["relays"] == 128), rows[-1])
    growth = {name: last[name] / first[name] for name in COLUMNS[1:] if name != "k" and first[name] and last[name]}
    if options.json:
        print(json.dumps({"blocks": blocks, "rows": rows, "growth": growth}))
        return
    table = Table(
        title=f"Seconds until all have {options.gigabytes:g} GB: {blocks} chunks,"
        f" links of {options.gigabytes_per_s:g} GB/s, {options.startup_us:g} µs"
    )
    for name in COLUMNS:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in COLUMNS))
    ratios = [f"{growth[name]:.3f}" if name in growth else "" for name in COLUMNS[1:]]
    table.add_row(f"T({last['relays']})/T({first['relays']})", *ratios, style="bold")
    Console(width=110).print(table)


def row_of(
    relays: int, blocks: int, block_s: float, all_s: float, startup_s: float, sources: int
) -> dict[str, float | int | None]:
    """The times of every schedule for `relays` relays, including the master or the `sources`."""
    several = max(1, min(sources, relays // 2))
    alone = {
        name: simulate(SCHEDULES[name](relays, blocks), 1, relays, blocks, block_s) for name in ("chain", "binomial")
    }
    joined = simulate(k_way("binomial", several, relays, blocks), several, relays, blocks, block_s)
    return {
        "relays": relays,
        "formula": formula(relays, all_s, startup_s),
        **{name: arrived.everywhere for name, arrived in alone.items()},
        "k": several,
        "k-way": joined.everywhere,
        "first_copy": joined.first_copy,
        "paper": PAPER_S.get(relays),
    }


def formula(relays: int, all_s: float, startup_s: float) -> float:
    """T(p) = M·Tb + (p − 2)·Ts + 2·√((p − 2)·M·Tb·Ts): the chain at its best number of chunks (Laminar, §4)."""
    return all_s + (relays - 2) * startup_s + 2 * math.sqrt((relays - 2) * all_s * startup_s)


def simulate(steps: Iterator[TransferStep], sources: int, nodes: int, blocks: int, block_s: float) -> Arrived:
    """Execute `steps` among `nodes` nodes, over links of equal rate; the first `sources` nodes have all blocks."""
    has = arrivals(steps, sources, nodes, blocks, block_s)
    return Arrived(float(has.max()), float(has[sources:].min(axis=0).max()))


def arrivals(steps: Iterator[TransferStep], sources: int, nodes: int, blocks: int, block_s: float) -> np.ndarray:
    """When each node has each block, in seconds [nodes, blocks], as `simulate`."""
    has = np.full((nodes, blocks), np.inf)
    has[:sources] = 0.0
    sends_from, receives_from = np.zeros(nodes), np.zeros(nodes)
    for step in steps:
        begin = np.maximum(has[step.sources, step.blocks], sends_from[step.sources])
        end = np.maximum(begin, receives_from[step.receivers]) + block_s
        if max(np.bincount(step.sources).max(), np.bincount(step.receivers).max()) > 1:
            end = _one_by_one(step, has, sends_from, receives_from, block_s)
        sends_from[step.sources] = receives_from[step.receivers] = end
        has[step.receivers, step.blocks] = end
    return has


def _one_by_one(
    step: TransferStep, has: np.ndarray, sends_from: np.ndarray, receives_from: np.ndarray, block_s: float
) -> np.ndarray:
    """The end of each transfer of `step` if a node transfers several blocks: its link takes them one by one."""
    ends = np.empty(len(step.blocks))
    for index, (source, receiver, block) in enumerate(zip(*step, strict=True)):
        ends[index] = max(has[source, block], sends_from[source], receives_from[receiver]) + block_s
        sends_from[source] = receives_from[receiver] = ends[index]
    return ends


def _cell(value: float | int | None) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else f"{value:,}"


if __name__ == "__main__":
    main()
