"""Accuracy gained by every algorithm on the demonstration, and accuracy lost by staleness.

    OMP_NUM_THREADS=1 python -m benchmarks.algorithms
    OMP_NUM_THREADS=1 python -m benchmarks.algorithms --lag 4 --only decoupled_ppo tis "tis, sequence" \
        --set trainer.learner.learning_rate=1e-4

Three algorithms train in whole runs, through Kafka. The others, and all with `--lag`, train in a plain loop over the
same engine, learner and Algorithm (benchmarks/recipe.py). Every cell of a seed starts from the same warm start, with
the same questions and learning rates. `--lag k` trains every batch k updates late and compares with a loop without lag
at the same learning rate: in the example, half of the demonstration's, at which gradients four updates late overshoot.
Each result is saved as soon as it is measured; run again, the command measures only missing cells. `--known` only
prints saved results. Exit code 1 if an algorithm gained less than 20 points, or lost more than 5 by its lag.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.recipe import run_seed
from benchmarks.results import Result, Results, add_results
from pipelines.config import load_config
from pipelines.present.report.machine import describe_machine

LOOSE = "correction_cap=5"
CELLS: Mapping[str, tuple[str, ...]] = {
    "grpo": (LOOSE,),
    "ppo": (LOOSE,),
    "decoupled_ppo": (LOOSE,),
    "dr_grpo": (LOOSE, "max_response_tokens=48"),
    "dapo": (LOOSE,),
    "rloo": (LOOSE, "aggregation=sequence_mean"),
    "reinforce_plus_plus": (LOOSE,),
    "reinforce_plus_plus_baseline": (LOOSE,),
    "gspo": (LOOSE,),
    "cispo": (LOOSE, "clip_low=0.2"),
    "tis": ("correction_cap=2",),
    "tis, sequence": ("correction_cap=2", "correction_level=sequence"),
    "icepop": (LOOSE, "aggregation=token_mean"),
}
"""Each algorithm, and the settings of its section besides the name."""
ONE_STEP = ("trainer.learner.mini_batches=1", "trainer.learner.epochs=1", "trainer.learner.critic.learning_rate=1e-3")
"""One optimizer step per batch for every algorithm, so that the cells differ in nothing else."""
THROUGH_KAFKA = ("grpo", "ppo", "decoupled_ppo")
ALIKE = ("decoupled_ppo", "tis", "tis, sequence")
"""Equal without lag: the policy that generated a batch trains on it, so every weight is 1 up to rounding. One loop
measures them all."""
GAIN, LOSS = 0.20, 0.05
LIMIT_S = 3600.0


class Cell(NamedTuple):
    """One cell: an algorithm, a seed, and how it is trained."""

    name: str
    seed: int
    how: str
    """`run`, `loop`, or `loop, lag k`."""

    @property
    def lag(self) -> int:
        return int(self.how.rpartition("lag ")[2]) if "lag" in self.how else 0

    def changes(self, heldout: int) -> list[str]:
        """Changes to the demonstration's configuration."""
        section, seed = "trainer.learner.algorithm", self.seed
        changes = [f"run.seed={seed}", f"warm_start.model.seed={seed}", f"prompts.heldout={heldout}"]
        changes += [f"warm_start.measured={heldout}", f"{section}.name={self.name.partition(',')[0]}"]
        return [*changes, *ONE_STEP, *[f"{section}.{change}" for change in CELLS[self.name]]]


def main() -> None:
    """Run the missing cells and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--config", type=Path, default=Path("examples/chain_sum.toml"))
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--lag", type=int, default=0, help="updates between a batch's weights and its training")
    arguments.add_argument("--loop", action="store_true", help="train every cell in the plain loop, without Kafka")
    arguments.add_argument("--only", nargs="+", choices=CELLS, default=list(CELLS))
    arguments.add_argument("--heldout", type=int, default=256)
    arguments.add_argument("--folder", type=Path, default=Path("runs"), help="folder of runs and warm starts")
    add_results(arguments, "runs/algorithms.json")
    arguments.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    done = Results(options.results)
    for cell in [] if options.known else requested_cells(options):
        done.add(key_of(cell, options), partial(run if cell.how == "run" else loop, cell, options))
    rows = [row for name in options.only if (row := row_of(name, done, options))]
    if options.json:
        print(json.dumps({"machine": describe_machine(), "seeds": options.seeds, "algorithms": rows}))
    else:
        show(rows, options)
    sys.exit(any(row["gain"] < GAIN or row.get("lost", 0.0) > LOSS for row in rows))


def requested_cells(options: argparse.Namespace) -> list[Cell]:
    """The requested cells, seed by seed."""
    return [
        Cell(name, seed, how)
        for seed in options.seeds
        for name in options.only
        for how in training_modes(name, options)
    ]


def training_modes(name: str, options: argparse.Namespace) -> list[str]:
    """How `name` is trained; its row reports the last one."""
    if options.lag:
        return ["loop", f"loop, lag {options.lag}"]
    return ["run" if name in THROUGH_KAFKA and not options.loop else "loop"]


def key_of(cell: Cell, options: argparse.Namespace) -> str:
    """The key of a result: everything that the result depends on."""
    name = "tis" if cell.how == "loop" and cell.name in ALIKE else cell.name
    return " ".join([name, f"seed={cell.seed}", cell.how, str(options.config), *options.set])


def loop(cell: Cell, options: argparse.Namespace) -> Result:
    """Train one algorithm from one warm start in the plain loop."""
    config = load_config(options.config, [*cell.changes(options.heldout), *options.set])
    with contextlib.redirect_stdout(io.StringIO()):
        outcome = run_seed(cell.seed, config, cell.lag, options.folder / "warm-starts")
    ends = statistics.fmean(outcome.rewards[:5]), statistics.fmean(outcome.rewards[-5:])
    return {"greedy": outcome.greedy, "sampled": outcome.sampled, "reward": ends}


def run(cell: Cell, options: argparse.Namespace) -> Result:
    """Train one algorithm in a whole run. Raises RuntimeError if the run or its audit fails."""
    folder = options.folder.absolute()
    name = f"algorithms-{cell.name.replace('_', '-')}-{cell.seed}"
    changes = [*cell.changes(options.heldout), *options.set, f"run.folder={folder}"]
    sets = [argument for change in changes for argument in ("--set", change)]
    shutil.rmtree(folder / name, ignore_errors=True)
    laminar = Path(sys.executable).with_name("laminar")
    command = [str(laminar), "run", str(options.config), "--name", name, "--json", *sets]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if completed.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {completed.returncode}: {completed.stderr[-2000:]}")
    found = json.loads((folder / name / "summary.json").read_text("utf-8"))
    if not found["audit_passed"]:
        raise RuntimeError(f"the audit of {folder / name} failed")
    accuracies = {kind: (found[f"{key}_before"], found[f"{key}_after"]) for kind, key in KINDS.items()}
    return {**accuracies, "reward": (found["reward_first"], found["reward_last"])}


KINDS = {"greedy": "heldout", "sampled": "heldout_sampled"}


def row_of(name: str, done: Results, options: argparse.Namespace) -> dict[str, Any]:
    """Means over the seeds with results; empty if there are none.

    `gain` and `least_gain` are of the accuracy of sampled answers to held-out questions, the expected reward. `lost`
    is the accuracy lost by the lag.
    """
    how = training_modes(name, options)
    found = [[done.get(key_of(Cell(name, seed, each), options)) for seed in options.seeds] for each in how]
    whole = [cells for cells in zip(*found, strict=True) if None not in cells]
    if not whole:
        return {}
    cells = [each[-1] for each in whole]
    gains = [cell["sampled"][1] - cell["sampled"][0] for cell in cells]
    row = {
        "algorithm": name,
        "how": how[-1],
        "seeds": len(cells),
        "sampled": [statistics.fmean(cell["sampled"][when] for cell in cells) for when in (0, 1)],
        "greedy": [statistics.fmean(cell["greedy"][when] for cell in cells) for when in (0, 1)],
        "gain": statistics.fmean(gains),
        "least_gain": min(gains),
    }
    if options.lag:
        row["without_lag"] = statistics.fmean(each[0]["sampled"][1] for each in whole)
        row["lost"] = row["without_lag"] - row["sampled"][1]
    return row


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the table."""
    machine = describe_machine()
    title = f"{options.config}, held-out accuracy; {machine['cores']} cores of {machine['cpu']}"
    table = Table(title=title, title_justify="left")
    columns = ["algorithm", "how", "seeds", "sampled", "greedy", "gain", "least gain"]
    for column in [*columns, *(["sampled without lag", "lost"] if options.lag else [])]:
        table.add_column(column, justify="left" if column in ("algorithm", "how") else "right")
    for row in rows:
        spans = [" → ".join(f"{value:.2f}" for value in row[kind]) for kind in ("sampled", "greedy")]
        numbers = [f"{row[key]:+.2f}" for key in ("gain", "least_gain")]
        lag = [f"{row['without_lag']:.2f}", f"{row['lost']:+.2f}"] if options.lag else []
        table.add_row(row["algorithm"], row["how"], str(row["seeds"]), *spans, *numbers, *lag)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
