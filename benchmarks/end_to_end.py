"""Seconds per global batch and to a reward, with Laminar and with TRL's GRPOTrainer on the same cores.

    make benchmark-end-to-end

Both start from the same warm-started model folder, take the same questions in the same order, generate equally many
responses to each, score them with the same code, and make one update a batch with the same settings, without
evaluation. They run one after the other. Time counts from the first dispatch (TRL: the first generation); start-up is
reported separately. Cells in the results file that have the same settings are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measures import median
from benchmarks.processes import OthersWatch
from benchmarks.sides import Side, Work, run_laminar, run_trl, warm_start
from infra.files import write_atomically
from pipelines.config import Config, load_config
from pipelines.present.report.machine import describe_machine, package_versions

RESULTS = Path("benchmarks/results/end_to_end.json")
FOLDER = Path("build/end_to_end")
WINDOW = 5
"""Global batches over which the reward must hold."""
NOISE = 0.05
"""Share of the machine's CPU time that other processes may use during a measurement."""


@dataclass(frozen=True)
class Recipe:
    """An example, the reward at which the clock stops, and the ratios to TRL's time: (at most, aim)."""

    example: Path
    reward: float
    ratios: tuple[float, float]


RECIPES = {
    "A": Recipe(Path("examples/chain_sum.toml"), 0.75, (1.0, 0.5)),
    "B": Recipe(Path("examples/gcd.toml"), 0.85, (0.7, 0.3)),
}
SIDES = {"laminar": run_laminar, "trl": run_trl}


def main() -> None:
    """Measure the missing cells, then print."""
    options = _options()
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    os.sched_setaffinity(0, cores)  # inherited by every process started here
    console = Console(stderr=options.json)
    found: dict[str, Any] = json.loads(options.results.read_text("utf-8")) if options.results.exists() else {}
    cells: dict[str, Any] = {} if options.fresh else found.get("cells", {})
    for name in options.recipes:
        for seed in options.seeds:
            _measure(name, seed, options, cells, console)
    chosen = {key: cell for key, cell in cells.items() if _is_requested(key, options)}
    if options.json:
        print(json.dumps({"machine": describe_machine(), "cells": chosen}, indent=1))
    else:
        _print(chosen, options, console)


def _measure(name: str, seed: int, options: argparse.Namespace, cells: dict[str, Any], console: Console) -> None:
    """Measure the missing cells of one recipe and seed; save each as soon as it is measured."""
    recipe, config = RECIPES[name], _config(RECIPES[name], seed, options)
    measured_with = {"optimizer_steps": config.trainer.optimizer_steps, "set": options.set, "trl": options.threads}
    known = {side: cells.get(f"{name}/{seed}/{side}", {}).get("measured_with") for side in SIDES}
    missing = [side for side in SIDES if known[side] != measured_with]
    if not missing:
        return
    work = Work(options.folder.absolute(), f"{name.lower()}-{seed}", config, options.threads)
    console.print(f"{name}, seed {seed}: warm start")
    model = warm_start(work)
    for side in missing:
        console.print(f"{name}, seed {seed}: {side}")
        others = OthersWatch()
        measured = SIDES[side](work, model)
        cell = _cell(measured, recipe, config)
        cell |= {"others": round(others.share(), 3), "measured_with": measured_with}
        cells[f"{name}/{seed}/{side}"] = cell
        table = {"machine": describe_machine(), "packages": package_versions(), "cells": cells}
        options.results.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.results, json.dumps(table, indent=1) + "\n")


def _config(recipe: Recipe, seed: int, options: argparse.Namespace) -> Config:
    changes = [f"run.seed={seed}", f'run.folder="{options.folder.absolute() / "runs"}"', *options.set]
    if options.steps:
        changes.append(f"trainer.optimizer_steps={options.steps}")
    return load_config(recipe.example, changes)


def _cell(side: Side, recipe: Recipe, config: Config) -> dict[str, Any]:
    speed = side.seconds_a_batch(config.experience.global_batch)
    return {
        "steps": len(side.steps),
        "seconds_per_batch": speed[0] if speed else None,
        "mean_seconds_per_batch": speed[1] if speed else None,
        "seconds_to_reward": side.seconds_to(recipe.reward, WINDOW),
        "reward_wanted": recipe.reward,
        **{key: value for key, value in asdict(side).items() if key != "steps"},
        "curve": [[round(step.ended, 2), round(step.reward, 4)] for step in side.steps],
    }


def _is_requested(key: str, options: argparse.Namespace) -> bool:
    name, seed, _ = key.split("/")
    return name in options.recipes and int(seed) in options.seeds


def _print(cells: Mapping[str, Any], options: argparse.Namespace, console: Console) -> None:
    machine = describe_machine()
    console.print(f"{machine['cpu']}, {options.cores} cores, {machine['system']}, Python {machine['python']}")
    console.print(", ".join(f"{name} {version}" for name, version in package_versions().items()))
    for side in SIDES:
        setups = {(cell["threads"], json.dumps(cell["versions"])) for key, cell in cells.items() if key.endswith(side)}
        for threads, versions in sorted(setups):
            console.print(f"{side}: {threads} threads; {', '.join(map(' '.join, json.loads(versions).items()))}")
    table = Table(title=f"Median of seeds {', '.join(map(str, options.seeds))}; ratio: Laminar to TRL")
    for column in ("recipe", "seconds", "laminar", "TRL", "ratio", "at most", "aim"):
        table.add_column(column, justify="left" if column in ("recipe", "seconds") else "right")
    for name in options.recipes:
        most, aim = RECIPES[name].ratios
        for key, label in _ROWS.items():
            ours, theirs = (_median(cells, name, side, key) for side in SIDES)
            ratio = f"{ours / theirs:.2f}" if ours and theirs else "-"
            bounds = ("", "") if key == "start_up_seconds" else (f"{most}", f"{aim}")
            table.add_row(name, label, _seconds(ours), _seconds(theirs), ratio, *bounds)
    console.print(table)
    _print_shares(cells, options, console)
    if noisy := [f"{key} ({cell['others']:.0%})" for key, cell in cells.items() if cell["others"] > NOISE]:
        console.print(f"UNRELIABLE, other processes used the machine meanwhile: {', '.join(noisy)}")


_ROWS = {
    "seconds_per_batch": "per batch, median",
    "mean_seconds_per_batch": "per batch, mean",
    "seconds_to_reward": "to the reward",
    "start_up_seconds": "start-up",
}


def _print_shares(cells: Mapping[str, Any], options: argparse.Namespace, console: Console) -> None:
    table = Table(title="CPU ms per global batch, by process; outside: the share outside model code")
    table.add_column("process")
    for name in options.recipes:
        table.add_column(name, justify="right")
        table.add_column("outside", justify="right")
    ours = {key: cell for key, cell in cells.items() if key.endswith("/laminar")}
    for role in sorted({role for cell in ours.values() for role in cell["cpu_seconds_per_batch"]}):
        row = []
        for name in options.recipes:
            of = [cell for key, cell in ours.items() if key.startswith(f"{name}/")]
            used = median(cell["cpu_seconds_per_batch"].get(role) for cell in of)
            share = median(cell["outside_model"].get(role) for cell in of)
            row += ["-" if used is None else f"{used * 1000:.0f}", "" if share is None else f"{share:.0%}"]
        table.add_row(role, *row)
    console.print(table)


def _median(cells: Mapping[str, Any], name: str, side: str, key: str) -> float | None:
    return median(cell[key] for cell_key, cell in cells.items() if cell_key.split("/")[::2] == [name, side])


def _seconds(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.2f}"


def _options() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    arguments.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments.add_argument("--steps", type=int, help="optimizer steps; by default the recipe's")
    arguments.add_argument("--threads", type=int, default=2, help="of TRL; the recipe sets Laminar's")
    arguments.add_argument("--cores", type=int, default=2)
    arguments.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change one setting")
    arguments.add_argument("--results", type=Path, default=RESULTS)
    arguments.add_argument("--folder", type=Path, default=FOLDER, help="runs, warm starts and logs")
    arguments.add_argument("--fresh", action="store_true", help="measure all cells again")
    arguments.add_argument("--json", action="store_true")
    return arguments.parse_args()


if __name__ == "__main__":
    main()
