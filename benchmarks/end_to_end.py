"""Seconds per global batch and to a reward: Laminar, a plain synchronous loop, and TRL's GRPOTrainer.

    make benchmark-end-to-end

The loop (`control`) runs our engine, learner and verifier on one core, and on two. TRL runs with two threads, with one,
and as two ranks. All start from the same warm-started model folder, take the same questions in the same order, generate
equally many responses to each, score them with the same code, and make one update a batch with the same settings,
without evaluation. They run one after the other, every side of a seed before the next seed. Time counts from the first
dispatch (others: the first generation); start-up is reported separately. CPU time is of all processes of a side; it is
comparable also where other work shares the machine. Cells in the results file are not measured again if settings, code,
processor and cores are the same.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measures import idle_share, median, spread
from benchmarks.other_sides import SECONDS_A_BATCH, run_control, run_trl
from benchmarks.processes import OthersWatch
from benchmarks.results import SIMULATED_CODE, checked_out, code_hash
from benchmarks.sides import Side, Work, run_laminar, warm_start
from infra.files import write_atomically
from pipelines.config import Config, load_config
from pipelines.present.report.machine import describe_machine, package_versions

RESULTS = Path("benchmarks/results/end_to_end.json")
FOLDER = Path("build/end_to_end")
WINDOW = 5
"""Global batches over which the reward must hold."""
MEASURING_CODE = [
    Path(__file__).with_name(name) for name in ("sides.py", "other_sides.py", "control.py", "recipe.py", "trl")
]
NOISE = 0.05
"""Share of the cores' CPU time that other processes may use during a measurement."""


@dataclass(frozen=True)
class Recipe:
    """An example, the reward at which the clock stops, and goals: ratios to the time of other sides, (at most, aim)."""

    example: Path
    reward: float
    goals: Mapping[str, tuple[float, float]]


RECIPES = {
    "A": Recipe(Path("examples/chain_sum.toml"), 0.75, {"control-1": (0.65, 0.55), "trl-2": (0.42, 0.36)}),
    "B": Recipe(Path("examples/gcd.toml"), 0.85, {"control-1": (0.80, 0.80), "trl-2": (0.18, 0.16)}),
}
SIDES: Mapping[str, Callable[[Work, Path], Side]] = {
    "laminar": run_laminar,
    "control-1": partial(run_control, threads=1),
    "control-2": partial(run_control, threads=2),
    "trl-2": partial(run_trl, threads=2),
    "trl-1": partial(run_trl, threads=1),
    "trl-ddp": partial(run_trl, threads=1, ranks=2),
}
"""By name; a figure in a name is the number of threads, `trl-ddp` has two ranks of one thread."""


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
    measured_with = {
        "optimizer_steps": config.trainer.optimizer_steps,
        "set": options.set,
        "cores": options.cores,
        "cpu": describe_machine()["cpu"],
        "code": code_hash(*SIMULATED_CODE, *MEASURING_CODE),
    }
    known = {side: cells.get(f"{name}/{seed}/{side}", {}).get("measured_with") for side in options.sides}
    missing = [side for side in options.sides if known[side] != measured_with]
    if not missing:
        return
    work = Work(options.folder.absolute(), f"{name.lower()}-{seed}", config)
    console.print(f"{name}, seed {seed}: warm start")
    model = warm_start(work)
    for side in missing:
        console.print(f"{name}, seed {seed}: {side}")
        others = OthersWatch()
        measured = SIDES[side](work, model)
        cell = _cell(measured, recipe, config)
        cell |= {"others": round(others.share(), 3), "commit": checked_out(), "measured_with": measured_with}
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
    name, seed, side = key.split("/")
    return name in options.recipes and int(seed) in options.seeds and side in options.sides


def _print(cells: Mapping[str, Any], options: argparse.Namespace, console: Console) -> None:
    machine = describe_machine()
    console.print(f"{machine['cpu']}, {options.cores} cores, {machine['system']}, Python {machine['python']}")
    console.print(", ".join(f"{name} {version}" for name, version in package_versions().items()))
    for side in options.sides:
        setups = {(cell["threads"], json.dumps(cell["versions"])) for key, cell in cells.items() if key.endswith(side)}
        for threads, versions in sorted(setups):
            console.print(f"{side}: {threads} threads; {', '.join(map(' '.join, json.loads(versions).items()))}")
    for name in options.recipes:
        _print_recipe(name, cells, options, console)
    _print_shares(cells, options, console)
    if noisy := [f"{key} ({cell['others']:.0%})" for key, cell in cells.items() if cell["others"] > NOISE]:
        console.print(f"UNRELIABLE, other processes used the machine meanwhile: {', '.join(noisy)}")


_ROWS = {
    "seconds_per_batch": "seconds a batch, median",
    "mean_seconds_per_batch": "seconds a batch, mean",
    "cpu_seconds": "CPU seconds a batch",
    "seconds_to_reward": "seconds to the reward",
    "start_up_seconds": "start-up, seconds",
}


_ENGINE = (
    ("tokens_a_cpu_second", "tokens a CPU second in engine steps", " (goal 90%)"),
    ("rows_a_step", "rows in an engine step", ""),
)


def _print_recipe(name: str, cells: Mapping[str, Any], options: argparse.Namespace, console: Console) -> None:
    """Medians of all sides; in brackets, Laminar's ratio to that side, paired by seed: median, range, seeds; goals."""
    seeds = ", ".join(map(str, options.seeds))
    table = Table(title=f"{name}: median of seeds {seeds} (ratio of Laminar paired by seed, its range; goal, aim)")
    for column in ("", *options.sides):
        table.add_column(column, justify="right" if column else "left")
    for key, label in _ROWS.items():
        row = [label]
        for side in options.sides:
            text = _seconds(_median(cells, name, side, key))
            paired = spread(_ratio(cells, name, seed, side, key) for seed in options.seeds)
            if side != "laminar" and paired is not None:
                goals = _goals(name, side, cells) if "start" not in key and "cpu" not in key else ()
                ratios = "{1:.2f}, {0:.2f} to {2:.2f}, n = {3}".format(*paired)
                text += f" ({ratios}{''.join(f'; {goal:.2f}' for goal in goals)})"
            row.append(text)
        table.add_row(*row)
    console.print(table)
    skipped = spread(cells.get(f"{name}/{seed}/laminar", {}).get("skipped_share") for seed in options.seeds)
    if skipped is not None:
        text = "{1:.0%} of the trajectories, {0:.0%} to {2:.0%}, n = {3}".format(*skipped)
        console.print(f"Laminar's trainer, and the control's, skip what has no advantage: {text}; TRL trains all")
    if (limit := _limit(name, cells)) is not None:
        console.print(
            f"limit, the slower side's model time of the loop's batches: {limit[0]:.3f} s, its {limit[1]} on one core; "
            "no bound: the loop's engine drains to no rows at every batch, an asynchronous one need not"
        )
        ours = _median(cells, name, "laminar", "mean_seconds_per_batch")
        if ours is not None:
            console.print(f"Laminar takes {ours / limit[0]:.2f} times this limit")
    for line in _use_of_cores(name, cells, options):
        console.print(line)


def _limit(name: str, cells: Mapping[str, Any]) -> tuple[float, str] | None:
    """Seconds of model time a batch of the slower part of the control, alone on one core; its name.

    With one core for each side a run takes as long if its engine's batches are those of the loop, which drain to no
    rows. An asynchronous engine may have more rows a step, and take less.
    """
    engine = median(_engine_figures(cells, name, "control-1", SECONDS_A_BATCH))
    training = median(_parts(cells, name, "control-1", "training"))
    return None if engine is None or training is None else max((engine, "engine"), (training, "training"))


def _goals(name: str, side: str, cells: Mapping[str, Any]) -> list[float]:
    """The goals of Laminar's ratio to `side`; beside the loop on one core none is below 1.25 times the limit's."""
    limit, theirs = _limit(name, cells), _median(cells, name, "control-1", "mean_seconds_per_batch")
    least = 1.25 * limit[0] / theirs if side == "control-1" and limit and theirs else 0.0
    return [max(goal, least) for goal in RECIPES[name].goals.get(side, ())]


def _use_of_cores(name: str, cells: Mapping[str, Any], options: argparse.Namespace) -> Iterator[str]:
    """What Laminar does with its cores beside model code, and what its engine does of it, beside the control's."""
    of = [cells.get(f"{name}/{seed}/laminar", {}) for seed in options.seeds]
    outside = median(_outside_share(cell) for cell in of if cell.get("outside_model"))
    if outside is not None:
        yield f"share of Laminar's CPU time outside model code: {outside:.0%} (goal 30%)"
    measured = [(cell, cpu) for cell in of if (cpu := _figure(cell, "cpu_seconds")) is not None]
    idle = median(
        idle_share(cpu, cell["mean_seconds_per_batch"], options.cores, cell["others"])
        for cell, cpu in measured
        if cell.get("mean_seconds_per_batch")
    )
    if idle is not None:
        yield f"share of the cores that is idle: {idle:.0%} (goal 10%)"
    for key, label, goal in _ENGINE:
        pair = [median(_engine_figures(cells, name, side, key)) for side in ("laminar", "control-1")]
        if None not in pair:
            yield f"{label}: {pair[0]:,.0f}, the control's engine {pair[1]:,.0f}: {pair[0] / pair[1]:.0%}{goal}"


def _outside_share(cell: Mapping[str, Any]) -> float:
    """The share of all CPU time of a run that is not model code of rollout or trainer."""
    cpu = cell["cpu_seconds_per_batch"]
    model = sum(cpu.get(part, 0.0) * (1 - share) for part, share in cell["outside_model"].items())
    return 1 - model / sum(cpu.values())


def _ratio(cells: Mapping[str, Any], name: str, seed: int, side: str, key: str) -> float | None:
    """Laminar's figure over that of `side`, with the same seed; None if one is missing."""
    ours, theirs = (_figure(cells.get(f"{name}/{seed}/{each}", {}), key) for each in ("laminar", side))
    return ours / theirs if ours and theirs else None


def _figure(cell: Mapping[str, Any], key: str) -> float | None:
    """A figure of a cell; `cpu_seconds` is the sum over its processes or parts."""
    if key != "cpu_seconds":
        return cell.get(key)
    return sum(cell.get("cpu_seconds_per_batch", {}).values()) or None


def _print_shares(cells: Mapping[str, Any], options: argparse.Namespace, console: Console) -> None:
    table = Table(title="CPU ms per global batch, by process or part; outside: the share outside model code")
    table.add_column("side")
    table.add_column("process or part")
    for name in options.recipes:
        table.add_column(name, justify="right")
        table.add_column("outside", justify="right")
    for side in options.sides:
        of_side = {key: cell for key, cell in cells.items() if key.endswith(f"/{side}")}
        for part in dict.fromkeys(part for cell in of_side.values() for part in cell["cpu_seconds_per_batch"]):
            row = []
            for name in options.recipes:
                used = median(_parts(cells, name, side, part))
                of = [cell for key, cell in of_side.items() if key.startswith(f"{name}/")]
                share = median(cell["outside_model"].get(part) for cell in of)
                row += ["-" if used is None else f"{used * 1000:.0f}", "" if share is None else f"{share:.0%}"]
            table.add_row(side, part, *row)
    console.print(table)


def _of(cells: Mapping[str, Any], name: str, side: str) -> list[Mapping[str, Any]]:
    """The cells of `side`, of every seed."""
    return [cell for key, cell in cells.items() if key.split("/")[::2] == [name, side]]


def _parts(cells: Mapping[str, Any], name: str, side: str, part: str) -> list[float | None]:
    """CPU seconds a batch of `part` of `side`, of every seed."""
    return [cell["cpu_seconds_per_batch"].get(part) for cell in _of(cells, name, side)]


def _engine_figures(cells: Mapping[str, Any], name: str, side: str, key: str) -> list[float | None]:
    """A figure of the engine of `side`, of every seed."""
    return [cell.get("engine", {}).get(key) for cell in _of(cells, name, side)]


def _median(cells: Mapping[str, Any], name: str, side: str, key: str) -> float | None:
    return median(_figure(cell, key) for cell in _of(cells, name, side))


def _seconds(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.2f}"


def _options(given: Sequence[str] | None = None) -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    arguments.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    arguments.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    arguments.add_argument("--steps", type=int, help="optimizer steps; by default the recipe's")
    arguments.add_argument("--cores", type=int, default=2)
    arguments.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change one setting")
    arguments.add_argument("--results", type=Path, default=RESULTS)
    arguments.add_argument("--folder", type=Path, default=FOLDER, help="runs, warm starts and logs")
    arguments.add_argument("--fresh", action="store_true", help="measure all cells again")
    arguments.add_argument("--json", action="store_true")
    return arguments.parse_args(given)


if __name__ == "__main__":
    main()
