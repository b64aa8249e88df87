"""What every algorithm makes of the demonstration: one plain loop (benchmarks/recipe.py) an algorithm and seed.

    OMP_NUM_THREADS=1 python -m benchmarks.algorithms --seeds 0 1 2
    OMP_NUM_THREADS=1 python -m benchmarks.algorithms --seeds 0 1 2 --lag 4 --only grpo decoupled_ppo tis

Every cell starts from the same warm start of its seed, with the same questions and rates; `--lag k` trains every batch
k updates late. A cell's result is written as soon as it is known, and started again the command goes on with those that
are missing. `laminar run` is the same training through Kafka; this one is for the algorithms alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.recipe import run_seed
from infra.files import write_atomically
from pipelines.config import load_config
from pipelines.report.machine import describe_machine

CELLS: Mapping[str, tuple[str, ...]] = {
    "grpo": (),
    "dr_grpo": ("max_response_tokens=48",),
    "dapo": (),
    "rloo": (),
    "reinforce_plus_plus": (),
    "reinforce_plus_plus_baseline": (),
    "gspo": (),
    "cispo": (),
    "decoupled_ppo": (),
    "tis": (),
    "tis, sequence": ("correction_level=sequence",),
    "icepop": (),
    "ppo": (),
}
"""Each algorithm, and what its section says besides its name."""
GAIN = 0.20
Cell = dict[str, Any]


def main() -> None:
    """Run what is missing and print the table. Exits with 1 if an algorithm gained less than 20 points."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--config", type=Path, default=Path("examples/chain_sum.toml"))
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--lag", type=int, default=0, help="updates between a batch's weights and its training")
    arguments.add_argument("--only", nargs="+", choices=CELLS, default=list(CELLS))
    arguments.add_argument("--heldout", type=int, default=256)
    arguments.add_argument("--cache", type=Path, default=Path("runs/warm-starts"))
    arguments.add_argument("--results", type=Path, default=Path("runs/algorithms.json"))
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    done: dict[str, Cell] = json.loads(options.results.read_text()) if options.results.exists() else {}
    wanted = {}
    for seed in options.seeds:
        for name in options.only:
            key = " ".join([name, f"seed={seed}", f"lag={options.lag}", str(options.config), *options.set])
            wanted[key] = name
            if key not in done:
                done[key] = measure(name, seed, options)
                options.results.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(options.results, json.dumps(done, indent=1))
    cells = {name: [done[key] for key, of in wanted.items() if of == name] for name in options.only}
    rows = [{"algorithm": name, **summary(found)} for name, found in cells.items()]
    if options.json:
        print(
            json.dumps({"machine": describe_machine(), "lag": options.lag, "seeds": options.seeds, "algorithms": rows})
        )
    else:
        show(rows, options)
    sys.exit(any(row["gain"] < GAIN for row in rows))


def measure(name: str, seed: int, options: argparse.Namespace) -> Cell:
    """One algorithm from one warm start."""
    section = "trainer.learner.algorithm"
    changes = [f"run.seed={seed}", f"warm_start.model.seed={seed}", f"prompts.heldout={options.heldout}"]
    changes += [f"warm_start.measured={options.heldout}", f"{section}.name={name.partition(',')[0]}"]
    changes += [f"{section}.{change}" for change in CELLS[name]]
    with contextlib.redirect_stdout(io.StringIO()):
        outcome = run_seed(seed, load_config(options.config, [*changes, *options.set]), options.lag, options.cache)
    ends = statistics.fmean(outcome.rewards[:5]), statistics.fmean(outcome.rewards[-5:])
    cell = {"greedy": outcome.greedy, "sampled": outcome.sampled, "reward": ends, "best": outcome.start.best}
    sys.stderr.write(f"{name}, seed {seed}: sampled {outcome.sampled}, greedy {outcome.greedy}, reward {ends}\n")
    return cell


def summary(cells: list[Cell]) -> dict[str, float]:
    """Means over seeds; `gain` and its least are of sampled answers to held-out questions: the expected reward."""
    gains = [cell["sampled"][1] - cell["sampled"][0] for cell in cells]
    return {
        "sampled_before": statistics.fmean(cell["sampled"][0] for cell in cells),
        "sampled": statistics.fmean(cell["sampled"][1] for cell in cells),
        "greedy_before": statistics.fmean(cell["greedy"][0] for cell in cells),
        "greedy": statistics.fmean(cell["greedy"][1] for cell in cells),
        "gain": statistics.fmean(gains),
        "least_gain": min(gains),
    }


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """The table."""
    seeds, machine = ", ".join(map(str, options.seeds)), describe_machine()
    title = f"{options.config}, seeds {seeds}, {options.lag} updates late; {machine['cores']} cores of {machine['cpu']}"
    table = Table(title=title, title_justify="left")
    for column in ("algorithm", "sampled before", "after", "greedy before", "after", "gain", "least gain"):
        table.add_column(column, justify="left" if column == "algorithm" else "right")
    for row in rows:
        table.add_row(row["algorithm"], *[f"{value:.3f}" for name, value in row.items() if name != "algorithm"])
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
