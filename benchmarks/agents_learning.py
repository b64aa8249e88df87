"""The calculator's task, learned as a built-in environment and as an agent over HTTP: what each run reaches, by seed.

    OMP_NUM_THREADS=1 python -m benchmarks.agents_learning
    python -m benchmarks.agents_learning --known

Both runs of a seed start from the same warm start, draw the same questions and make the same number of optimizer steps:
`examples/calculator.toml` has the tool in the rollout, `examples/agents.toml` calls the gateway with the package openai
(extra `agents`). Each result is saved as soon
as it is measured; run again, the command measures only what is missing. `--known` only prints saved results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measures import median
from benchmarks.results import ROOT, Result, Results, add_results
from pipelines.distribution import LAMINAR
from pipelines.present.report.machine import describe_machine

EXAMPLES = {"environment": "examples/calculator.toml", "agent over HTTP": "examples/agents.toml"}
FIGURES = {
    "heldout_before": "accuracy before",
    "heldout_after": "after",
    "reward_first": "reward before",
    "reward_last": "after",
    "wall_seconds": "seconds",
}
"""Fields of a result, and their columns. Accuracy is greedy on held-out questions, reward of sampled answers."""


def main() -> None:
    """Measure the missing cells and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--heldout", type=int, default=128)
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting to change")
    add_results(arguments, "runs/agents_learning.json")
    options = arguments.parse_args()
    done = Results(options.results)
    for seed, side in [] if options.known else itertools.product(options.seeds, EXAMPLES):
        changes = (f"run.seed={seed}", f"prompts.heldout={options.heldout}", *options.set)
        done.add(key_of(side, seed, options), partial(measure, EXAMPLES[side], changes))
    rows = {
        side: [found for seed in options.seeds if (found := done.get(key_of(side, seed, options)))] for side in EXAMPLES
    }
    if options.json:
        print(json.dumps({"machine": describe_machine(), "set": options.set, "sides": rows}))
    else:
        show(rows)


def key_of(side: str, seed: int, options: argparse.Namespace) -> str:
    """The key of a result."""
    return ", ".join([side, f"seed {seed}", f"{options.heldout} held out", *options.set])


def measure(example: str, changes: tuple[str, ...]) -> Result:
    """The figures of a run of `example` that passed its audit."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [part for change in (*changes, f"run.folder={folder}") for part in ("--set", change)]
        command = [*LAMINAR, "run", example, "--name", "learning", *settings]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=sys.stderr, check=True)
        summary = json.loads(Path(folder, "learning", "summary.json").read_text())
    assert summary["audit_passed"], summary
    return {name: summary[name] for name in FIGURES}


def show(rows: Mapping[str, list[dict[str, Any]]]) -> None:
    """Print the table: by seed, and the median."""
    table = Table(title="by seed, then the median", title_justify="left")
    for column in ("side", *FIGURES.values()):
        table.add_column(column)
    for side, results in rows.items():
        if results:
            found = [[float(result[name]) for result in results] for name in FIGURES]
            table.add_row(side, *("  ".join(f"{x:.3g}" for x in each) + f"  | {median(each):.3g}" for each in found))
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
