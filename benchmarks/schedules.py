"""Five schedules on an emulated cluster: 16 GPUs generate and 16 train a 32B model, on the real pipelines.

    python -m benchmarks.schedules [--seeds 0 1 2] [--steps 6] [--train-us 25] [--time-scale 20] [--known] [--json]

Four replicas of four GPUs each run 512 trajectories at a time; the trainer works at half of its GPUs' peak: 25 us per
token. Every schedule trains the same number of trajectories. Throughput is that of the Laminar paper: tokens of a
global batch, prompts included, per time between two steps. Bubbles are the share of all 32 GPUs' time without work.
Figures are means over seeds. Each result is saved as soon as it is measured; run again, the command measures only
missing runs. `--known` only prints saved results.

`--predicted` runs nothing: it predicts the same runs in virtual time (`laminar simulate`), beside the measured figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.emulated_runs import run_emulated
from benchmarks.results import Result, Results
from pipelines.config import load_config
from pipelines.present.report.machine import describe_machine
from pipelines.simulate.prediction.cluster import Cluster
from pipelines.simulate.prediction.measurement import Prediction
from pipelines.simulate.prediction.world import PredictedWorld

EXAMPLE = Path(__file__).parents[1] / "examples" / "emulated.toml"
SCHEDULES = ("synchronous", "one_step", "stream", "partial_rollout", "laminar")
VARIANTS = {"slot": ["placement.refresh=slot"], "no_repack": ["placement.repack=false"]}
"""Changes of the schedule `laminar`, which `--schedules` takes too."""
GLOBAL_BATCH = 1024
MEASURED = {
    "synchronous": 11_293.0,
    "one_step": 16_452.0,
    "stream": 16_655.0,
    "partial_rollout": 31_305.0,
    "laminar": 32_843.0,
}
"""Trained tokens/s of docs/benchmarks.md: means of three seeds with the default options."""


def changes(schedule: str, train_us: float, time_scale: float, steps: int, seed: int) -> list[str]:
    """Changes to the example's configuration."""
    return [
        f"run.seed={seed}",
        f"run.time_scale={time_scale}",
        "rollout.replicas=4",
        "rollout.slots=512",
        "rollout.heartbeat_s=0.25",
        f"placement.schedule={'laminar' if schedule in VARIANTS else schedule}",
        *VARIANTS.get(schedule, ()),
        f"placement.repack_s={5.0 / time_scale}",
        f"experience.global_batch={GLOBAL_BATCH}",
        "experience.max_staleness=4",
        f"trainer.optimizer_steps={steps}",
        f"trainer.emulation.step_s=[[0.0, 5.0], [1e6, {5 + train_us}]]",
    ]


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=(*SCHEDULES, *VARIANTS))
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--steps", type=int, default=6)
    arguments.add_argument("--train-us", type=float, default=25.0, help="the trainer's time per token, microseconds")
    arguments.add_argument("--time-scale", type=float, default=20.0)
    arguments.add_argument("--folder", type=Path, help="the folder of the runs; by default a temporary one")
    arguments.add_argument("--results", type=Path, default=Path("runs/schedules.json"))
    arguments.add_argument("--known", action="store_true", help="only print saved results")
    arguments.add_argument("--predicted", action="store_true", help="predict the runs, beside the measured figures")
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    if options.predicted:
        _print_predicted(options)
        return
    results = Results(options.results)
    with tempfile.TemporaryDirectory(prefix="laminar-schedules-") as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        for seed in [] if options.known else options.seeds:  # alternating: other work on the machine affects all alike
            for schedule in options.schedules:
                results.add(key_of(schedule, seed, options), partial(measure, schedule, seed, options, folder))
    found = {
        schedule: [each for seed in options.seeds if (each := results.get(key_of(schedule, seed, options)))]
        for schedule in options.schedules
    }
    if options.json:
        print(json.dumps(found))
        return
    console = Console(width=120)
    console.print(_table({schedule: runs for schedule, runs in found.items() if runs}))
    seeds = ", ".join(map(str, options.seeds))
    console.print(f"{options.steps} global batches of {GLOBAL_BATCH}, time scale {options.time_scale:g}, seeds {seeds}")
    console.print(describe_machine())


def key_of(schedule: str, seed: int, options: argparse.Namespace) -> str:
    """The key of a result: everything that the result depends on."""
    return (
        f"{schedule} seed={seed} steps={options.steps} train_us={options.train_us:g} time_scale={options.time_scale:g}"
    )


def measure(schedule: str, seed: int, options: argparse.Namespace, folder: Path) -> Result:
    """Measure one run. Raises RunFailed."""
    settings = changes(schedule, options.train_us, options.time_scale, options.steps, seed)
    return run_emulated(EXAMPLE, f"{schedule.replace('_', '-')}-{seed}", folder, settings).to_json()


def predicted(schedule: str, options: argparse.Namespace) -> Prediction:
    """The prediction of the run of the first seed."""
    settings = changes(schedule, options.train_us, options.time_scale, options.steps, options.seeds[0])
    cluster = Cluster(load_config(EXAMPLE, settings), train_gpus=16, gpus_per_replica=4)
    return PredictedWorld(cluster).run().prediction()


def _print_predicted(options: argparse.Namespace) -> None:
    found = {schedule: predicted(schedule, options) for schedule in options.schedules}
    if options.json:
        print(json.dumps({name: each.to_json() for name, each in found.items()}))
        return
    table = Table(title="16 + 16 emulated H800, 32B: predicted and measured")
    for column in (
        "schedule",
        "predicted tokens/s",
        "measured",
        "difference",
        "idle GPUs",
        "staleness",
        "max",
        "latency s",
    ):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for name, each in found.items():
        rate, measured = each.trained_tokens_per_s, MEASURED.get(name)
        shares = f"{100 * each.bubbles:.1f} %", f"{each.staleness_mean:.2f}", f"{each.staleness_max}"
        known = ("", "") if measured is None else (f"{measured:,.0f}", f"{100 * (rate / measured - 1):+.1f} %")
        table.add_row(name, f"{rate:,.0f}", *known, *shares, f"{each.latency_s:.0f}")
    Console(width=120).print(table)


def _table(found: Mapping[str, Sequence[Result]]) -> Table:
    table = Table(title="16 + 16 emulated H800, 32B")
    figures = ("trained tokens/s", "ratio to the first", "bubbles", "staleness", "max", "latency s")
    for column in ("schedule", "runs", *figures):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    first = next((_mean(runs, "trained_tokens_per_s") for runs in found.values()), 0.0)
    for schedule, runs in found.items():
        rate = _mean(runs, "trained_tokens_per_s")
        table.add_row(
            schedule,
            str(len(runs)),
            f"{rate:,.0f}",
            f"{rate / first:.2f}x",
            f"{100 * _mean(runs, 'bubbles'):.1f} %",
            f"{_mean(runs, 'staleness_mean'):.2f}",
            f"{max(each['staleness_max'] for each in runs):.0f}",
            f"{_mean(runs, 'latency_s'):.0f}",
        )
    return table


def _mean(runs: Sequence[Result], name: str) -> float:
    return statistics.fmean(each[name] for each in runs)


if __name__ == "__main__":
    main()
