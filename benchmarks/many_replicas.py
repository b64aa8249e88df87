"""The number of emulated replicas that one machine can run: clusters of growing size, on the real Kafka and pipelines.

    python -m benchmarks.many_replicas [--replicas 16 64] [--time-scale 4] [--steps 5] [--seed 0] [--known] [--json]

Global batches grow with the number of replicas, so each replica has the same work. If a replica generates as many
tokens/s among 64 as among 16, the machine keeps up and the emulation is valid; if not, the time scale is too high. One
rollout process hosts all replicas. The benchmark fails if a run's audit fails.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.emulated_runs import emulated_run, finished_spans, measure
from benchmarks.results import Result, Results, add_results
from pipelines.config import load_config
from pipelines.inspect.metrics_file import read_metrics
from pipelines.present.report.machine import describe_machine

EXAMPLE = Path(__file__).parents[1] / "examples" / "emulated.toml"
BATCH = 128
"""Trajectories per global batch and replica."""


def changes(replicas: int, options: argparse.Namespace) -> list[str]:
    """Changes to the example's configuration."""
    scale = options.time_scale
    return [
        f"run.seed={options.seed}",
        f"run.time_scale={scale}",
        f"rollout.replicas={replicas}",
        f"placement.repack_s={5.0 / scale}",
        f"placement.prompt_lead={8 * replicas}",
        f"experience.global_batch={BATCH * replicas}",
        f"trainer.optimizer_steps={options.steps}",
        "trainer.emulation.step_s=[[0.0, 1.0], [1e6, 1.1]]",
    ]


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--replicas", type=int, nargs="+", default=[16, 64])
    arguments.add_argument("--time-scale", type=float, default=4.0)
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--folder", type=Path, help="the folder of the runs; by default a temporary one")
    add_results(arguments, "runs/many_replicas.json")
    options = arguments.parse_args()
    results = Results(options.results)
    keys = {
        n: f"{n} replicas, time_scale={options.time_scale:g} steps={options.steps} seed={options.seed}"
        for n in options.replicas
    }
    with tempfile.TemporaryDirectory(prefix="laminar-many-") as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        for replicas, key in {} if options.known else keys.items():
            results.add(key, partial(run, replicas, options, folder))
    found = [row for key in keys.values() if (row := results.get(key))]
    if options.json:
        print(json.dumps(found))
        return
    console = Console(width=120)
    console.print(_table(found, options.time_scale))
    console.print(describe_machine())


def run(replicas: int, options: argparse.Namespace, folder: Path) -> Result:
    """Measure one run. Raises RunFailed, also if its audit fails."""
    name = f"many-{replicas}"
    with emulated_run(EXAMPLE, name, folder, changes(replicas, options)) as (at, client):
        config, audit = load_config(at / "config.toml"), json.loads((at / "audit.json").read_text())
        metrics, spans = read_metrics(at / "metrics.jsonl"), finished_spans(client, name)
    ran = measure(metrics, spans, config.run.time_scale, config.rollout.emulation.stride)
    wall = ran.seconds / config.run.time_scale
    used = [each for each in metrics if each.name == "rollout"]
    cpu = used[-1].values["cpu/process_seconds"] - used[0].values["cpu/process_seconds"]
    return {
        "replicas": replicas,
        "trained": audit["trained"],
        "lost": audit["lost"],
        "audit_passed": audit["passed"],
        "wall_s": wall,
        "tokens_per_s_each": ran.generated_tokens_per_s / replicas,
        "kv_use": ran.kv_use,
        "latency_s": ran.latency_s,
        "trajectories_per_s": (options.steps - 2) * BATCH * replicas / wall,
        "rollout_cpu": cpu / ((used[-1].measured_at - used[0].measured_at) / 1000),
    }


def _table(found: Sequence[Result], time_scale: float) -> Table:
    table = Table(title=f"32B on 4 H800 each, {time_scale:g} emulated seconds per second")
    columns = (
        "replicas",
        "trained",
        "tokens/s each",
        "KV use",
        "latency s",
        "trajectories/s (wall clock)",
        "rollout CPU",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in found:
        table.add_row(
            str(row["replicas"]),
            f"{row['trained']:,}",
            f"{row['tokens_per_s_each']:,.0f}",
            f"{100 * row['kv_use']:.0f} %",
            f"{row['latency_s']:.0f}",
            f"{row['trajectories_per_s']:.0f}",
            f"{100 * row['rollout_cpu']:.0f} %",
        )
    return table


if __name__ == "__main__":
    main()
