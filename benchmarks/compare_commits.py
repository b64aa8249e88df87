"""The cost of a benchmark in two checkouts, by turns: what a change costs, on a machine that does other work too.

    git worktree add --detach ../before COMMIT
    python -m benchmarks.compare_commits ../before . --figure placement.0.us_per_trajectory -- \\
        benchmarks.placement --replicas 64 --rounds 1 --json

Each round runs the module with its arguments in both checkouts, in alternating order. Compared is a figure of the JSON
that it prints (a path of keys and indices; where it leads to numbers by name, their sum), or else the CPU seconds of
the whole process with its children, start included. Give figures that are CPU times: other work on the machine changes
times of a clock much more. `ratio` is the median of the rounds' ratios, with the quartiles: what affects both runs of a
round cancels out. With `--over-model` the figure is a cell of `benchmarks.end_to_end`, its CPU time divided by that of
the same run in model code, which both commits do alike: the pace of a virtual machine cancels out as well.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--figure", default="", help="path in the JSON, such as placement.0.us_per_trajectory")
    parser.add_argument("--over-model", action="store_true", help="the figure is a cell: its CPU over its models' CPU")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("module", nargs="+", help="after --: the benchmark's module and its arguments")
    options = parser.parse_args()
    read = over_model if options.over_model else lookup
    sides = options.before, options.after
    rounds: list[tuple[float, float]] = []
    for number in range(options.rounds):
        turn = {side: measure(side, options.module, options.figure, read) for side in sides[:: -1 if number % 2 else 1]}
        rounds.append((turn[options.before], turn[options.after]))
        print(f"round {number + 1}: {rounds[-1][0]:.4g}, {rounds[-1][1]:.4g}", file=sys.stderr)
    found = compare(rounds)
    if options.json:
        print(json.dumps(found))
    else:
        print(", ".join(f"{name} {value:.4g}" for name, value in found.items()))


def measure(checkout: Path, module: Sequence[str], figure: str, read: Callable[[Any, str], float]) -> float:
    """The figure of one run of `module` in `checkout`; without `figure`, its CPU seconds."""
    before = cpu_s()
    done = subprocess.run(
        [sys.executable, "-m", *module],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout.absolute())},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return read(json.loads(done.stdout), figure) if figure else cpu_s() - before


def cpu_s() -> float:
    """CPU seconds of the ended children of this process."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def lookup(value: Any, path: str) -> float:
    """The number at `path`, such as `rows.0.us`, or the sum of the numbers by name that are there.

    Raises KeyError, IndexError, TypeError or ValueError if there is none.
    """
    found = find(value, path)
    return sum(map(float, found.values())) if isinstance(found, dict) else float(found)


def over_model(value: Any, path: str) -> float:
    """All CPU seconds a batch of the cell at `path` over those in model code."""
    cell = find(value, path)
    cpu: dict[str, float] = cell["cpu_seconds_per_batch"]
    return sum(cpu.values()) / sum(cpu[role] * (1 - share) for role, share in cell["outside_model"].items())


def find(value: Any, path: str) -> Any:
    """What is at `path`, such as `rows.0.us`."""
    for key in path.split("."):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def compare(rounds: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The medians of both sides, and the median of the rounds' ratios with its quartiles."""
    ratios = [after / before for before, after in rounds]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    before, after = (statistics.median(side) for side in zip(*rounds, strict=True))
    return {"before": before, "after": after, "ratio": middle, "lower_quartile": low, "upper_quartile": high}


if __name__ == "__main__":
    main()
