"""The gain of repack: an emulated cluster with and without repack, on the real Kafka and pipelines, and the bound.

    python -m benchmarks.repack [--replicas 16] [--time-scale 1] [--stride 4] [--steps 5] [--seed 0] [--json]
    python -m benchmarks.repack --moves --replicas 8 --stride 1 --shorter 8 --steps 2

Each replica of a 32B model on four H800 takes 512 trajectories at a time; a global batch has 512 per replica. The
trainer is fast, so that generation alone limits the speed. The bound is that of `benchmarks/repack_bound.py`: the same
schedulers and lengths, with free moves planned every second. `--moves` measures only the times of moves, from plan to
next token, in wall-clock time, in one run whose responses may be shorter.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.emulated_runs import RunMeasurement, emulated_run, run_emulated
from benchmarks.moves import Moves, moves_of
from benchmarks.repack_bound import PLACEMENTS, Cluster, Figures, Simulation
from pipelines.present.report.machine import describe_machine

EXAMPLE = Path(__file__).parents[1] / "examples" / "emulated.toml"
BATCH = 512
"""Trajectories that a replica takes at a time."""
MOST_REQUESTS = 160
"""Maximum requests of a replica after moves: beyond the roofline's knee each request decodes more slowly."""
NAMES = ("none", "repack")
PERIOD_S = 5.0
"""Emulated seconds between two plans."""


def changes(repack: bool, options: argparse.Namespace) -> list[str]:
    """Changes to the example: one emulated token stands for `stride` real ones; lengths are divided by `shorter`."""
    replicas, part = options.replicas, options.stride * options.shorter
    return [
        f"run.seed={options.seed}",
        f"run.time_scale={options.time_scale}",
        f"prompts.prompt_tokens={2048 // part}",
        f"prompts.max_new_tokens={16_384 // part}",
        f"rollout.replicas={replicas}",
        f"rollout.slots={BATCH}",
        f"rollout.context={18_432 // part}",
        f"rollout.kv_capacity={819_200 // part}",
        f"rollout.emulation.stride={options.stride}",
        f"rollout.emulation.lengths={{p50 = {2000 // part}, p99 = {16_000 // part}}}",
        f"placement.max_replicas={replicas}",
        f"placement.repack_requests={MOST_REQUESTS}",
        "rollout.heartbeat_s=0.25",
        f"placement.repack={str(repack).lower()}",
        f"placement.repack_s={PERIOD_S / options.time_scale}",
        f"experience.global_batch={BATCH * replicas}",
        "experience.max_staleness=2",
        f"trainer.optimizer_steps={options.steps}",
        "trainer.emulation.step_s=[[0.0, 1.0], [1e6, 1.1]]",
        "trainer.checkpoint_every=1",
    ]


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--replicas", type=int, default=16)
    arguments.add_argument("--time-scale", type=float, default=1.0)
    arguments.add_argument("--stride", type=int, default=4, choices=(1, 2, 4, 8))
    arguments.add_argument(
        "--shorter",
        type=int,
        default=1,
        choices=(1, 2, 4, 8),
        help="divide lengths of responses, prompts and KV by this",
    )
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--folder", type=Path, help="the folder of the runs; by default a temporary one")
    arguments.add_argument("--moves", action="store_true", help="measure only the times of moves")
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="laminar-repack-") as temporary:
        folder = (options.folder or Path(temporary)).absolute()

        if options.moves:
            name = f"moves-{options.seed}"
            with emulated_run(EXAMPLE, name, folder, changes(True, options)) as (_, client):
                _print_moves(moves_of(client, name), options)
            return

        def run(name: str) -> RunMeasurement:
            return run_emulated(EXAMPLE, f"{name}-{options.seed}", folder, changes(name == "repack", options))

        with ThreadPoolExecutor() as pool:  # concurrently: other work on the machine affects both alike
            ran = dict(zip(NAMES, pool.map(run, NAMES), strict=True))
    cluster = Cluster(options.replicas, BATCH, global_batch=BATCH * options.replicas, seed=options.seed)
    bound = {name: _simulated(name, cluster) for name in PLACEMENTS}
    if options.json:
        found = {name: each.to_json() for name, each in ran.items()}
        print(json.dumps({"measured": found, "bound": {name: vars(each) for name, each in bound.items()}}))
        return
    console = Console(width=110)
    console.print(_table(ran, bound, options.replicas))
    console.print(_describe_moves(ran["repack"].moves))
    steps = f"{options.steps} global batches of {BATCH * options.replicas:,}"
    console.print(f"time scale {options.time_scale:g}, stride {options.stride}, {steps}, seed {options.seed}")
    console.print(describe_machine())


def _print_moves(moves: Moves, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(asdict(moves)))
        return
    console = Console(width=110)
    console.print(_describe_moves(moves))
    of, shorter = f"{options.replicas} replicas, time scale {options.time_scale:g}", f"{options.shorter} times shorter"
    console.print(f"{of}, stride {options.stride}, {shorter}, seed {options.seed}")
    console.print(describe_machine())


def _describe_moves(moves: Moves) -> str:
    steps = ", ".join(f"{name} {seconds:.3f}" for name, seconds in moves.steps_s.items())
    return (
        f"{moves.planned:,} moves planned, {moves.moved:,} made, {moves.without_tokens:,} before their first token;"
        f" from plan to hand-over {moves.hand_over_s:.2f} s, to the next token {moves.resumed_s:.2f} s, to a plan's"
        f" first {moves.plan_resumed_s:.2f} s of wall-clock time (medians; {moves.plans} plans). Steps of the"
        f" plan's first move, s: {steps}"
    )


def _simulated(name: str, cluster: Cluster) -> Figures:
    place, every_s, free = PLACEMENTS[name]
    return Simulation(cluster, free).run(3600.0, place, every_s)


def _table(ran: Mapping[str, RunMeasurement], bound: Mapping[str, Figures], replicas: int) -> Table:
    table = Table(title=f"{replicas} replicas, 32B on 4 H800 each; p50 2,000 and p99 16,000 tokens")
    for column in ("", "generated tokens/s", "gain", "mean KV use", "gain", "mean latency s"):
        table.add_column(column, justify="right" if column else "left")
    base = ran["none"]
    for name, each in ran.items():
        gains = each.generated_tokens_per_s / base.generated_tokens_per_s, each.kv_use / base.kv_use
        table.add_row(*_row(f"measured, {name}", each.generated_tokens_per_s, each.kv_use, each.latency_s, gains))
    first = bound["none"]
    for name, model in bound.items():
        gains = model.tokens_per_s / first.tokens_per_s, model.kv_use / first.kv_use
        table.add_row(*_row(f"simulated, {name}", model.tokens_per_s, model.kv_use, model.latency_s, gains))
    return table


def _row(name: str, rate: float, kv: float, latency: float, gains: tuple[float, float]) -> list[str]:
    more = [f"{100 * (gain - 1):+.1f} %" for gain in gains]
    return [name, f"{rate:,.0f}", more[0], f"{100 * kv:.1f} %", more[1], f"{latency:.0f}"]


if __name__ == "__main__":
    main()
