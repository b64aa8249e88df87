"""The cost of the relay tier in one table: stall, pull, hop, chains over equal links, repair, deltas.

    OMP_NUM_THREADS=1 python -m benchmarks.relay [--only memory hop ...]

Every figure is measured together with its baseline, in the same run. relay_simulation.py simulates more relays than one
machine can run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.processes import OthersWatch
from benchmarks.relay_delta import measure_delta
from benchmarks.relay_memory import measure_memory
from benchmarks.relay_network import measure_hop, measure_repair, measure_throttled

MEGABYTE = 1_000_000
KILLS = 5
"""The minimum number of kills for a median."""


@dataclass(frozen=True)
class Figure:
    """One row: the quantity, its measurement, and its goal."""

    what: str
    measured: str
    goal: str
    met: bool


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    watch = OthersWatch()
    figures = [figure for part in options.only for figure in PARTS[part](options.repetitions)]
    others = watch.share()
    if options.json:
        print(json.dumps({"figures": [asdict(figure) for figure in figures], "others": others}))
        return
    table = Table(title=f"The relay tier; other processes used {100 * others:.0f} % of the machine's CPU time")
    for column in ("figure", "measured", "goal", ""):
        table.add_column(column)
    for figure in figures:
        table.add_row(figure.what, figure.measured, figure.goal, "met" if figure.met else "missed")
    Console(width=150).print(table)


def memory(repetitions: int) -> Iterator[Figure]:
    """The trainer's stall at a publish, and a rollout's pull."""
    times = measure_memory(1000, repetitions)
    for what, ours, goal in (("trainer's stall", times.publish, 1.2), ("local pull into torch", times.pull, 1.5)):
        ratio = times.ratio(ours)
        took = f"{_ms(ours)} beside a copy's {_ms(times.copy)}: {ratio:.2f}"
        yield Figure(f"{what}, 1 GB", took, f"≤ {goal}", ratio <= goal)


def hop(repetitions: int) -> Iterator[Figure]:
    """One hop without a rate limit."""
    found = measure_hop(500, 8 << 20, repetitions)
    moved, visible, bare = (statistics.median(rates) / 1e9 for rates in (found.moved, found.visible, found.bare))
    measured = (
        f"{moved:.2f} GB/s beside {bare:.2f} of a bare socket pair: {found.share:.2f}; {visible:.2f} until visible"
    )
    yield Figure("one hop, 500 MB, chunks checked", measured, "≥ 0.70", found.share >= 0.7)


def throttled(repetitions: int) -> Iterator[Figure]:
    """Schedules over links of equal rate."""
    found = measure_throttled(32, 8e6, min(repetitions, 3))
    chain = found.chain
    growth, error = chain[8] / chain[2], found.fitted / chain[8] - 1
    at = ", ".join(f"T({relays}) {seconds:.2f} s" for relays, seconds in chain.items())
    yield Figure("chain, 128 chunks, 8 MB/s", f"{at}: T(8)/T(2) {growth:.3f}", "≤ 1.1", growth <= 1.1)
    fitted = f"{found.fitted:.2f} s by T(2) and T(4): {100 * error:+.1f} %"
    yield Figure("its cost model for 8", fitted, "± 10 %", abs(error) <= 0.1)
    few = f"chain {found.few_chain:.2f} s, binomial {found.few_binomial:.2f} s"
    yield Figure("8 relays, 4 chunks", few, "binomial ≤ chain", found.few_binomial <= found.few_chain)


def repair(repetitions: int) -> Iterator[Figure]:
    """A relay in the middle of a chain is killed, several times."""
    found = [measure_repair(16, 8e6) for _ in range(max(repetitions, KILLS))]
    seconds, chunks = [each.seconds for each in found], [each.chunks for each in found]
    until_next, again = _median_and_worst(seconds, ".3f"), _median_and_worst(chunks, ".0f")
    measured = f"next chunk after {until_next} s, {again} chunks requested again"
    yield Figure(
        f"a middle relay killed {len(found)} times", measured, "< 1 s, ≤ 2", max(seconds) < 1 and max(chunks) <= 2
    )


def delta(repetitions: int) -> Iterator[Figure]:
    """The delta of one optimizer step."""
    found = measure_delta(steps=3, repetitions=repetitions)
    size = f"{found.bytes / MEGABYTE:.1f} of {found.full / MEGABYTE:.0f} MB: {found.full / found.bytes:.0f}× fewer"
    yield Figure(
        f"delta of an AdamW step, lr 1e-6, {found.parameters / 1e6:.0f} M",
        size,
        "≥ 30×",
        found.full >= 30 * found.bytes,
    )
    took = f"encode {1000 * found.encode_s:.0f} + decode {1000 * found.decode_s:.0f} ms"
    cpu = f"CPU {1000 * found.encode_cpu_s:.0f} + {1000 * found.decode_cpu_s:.0f}"
    goal = found.full / 1.25e9
    met = found.exact and found.encode_s + found.decode_s < goal
    yield Figure(
        "its encoding and decoding",
        f"{took}, {cpu}; bit-exact: {found.exact}",
        f"< {1000 * goal:.0f} ms (10 Gbit/s)",
        met,
    )


def _median_and_worst(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} (worst {max(values):{form}})"


def _ms(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.0f} ms"


PARTS: dict[str, Callable[[int], Iterator[Figure]]] = {
    "memory": memory,
    "hop": hop,
    "throttled": throttled,
    "repair": repair,
    "delta": delta,
}


if __name__ == "__main__":
    main()
