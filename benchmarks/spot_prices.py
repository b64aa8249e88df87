"""An autoscaled cluster on a trace of spot prices: what its tokens cost, beside clusters of a fixed size.

    python -m benchmarks.spot_prices [CONFIG.toml] [--trace benchmarks/spot_prices.csv] [--minutes 60] [--json]

The autoscaler's decisions (policy `price`) on replicas in virtual time, as benchmarks/preemption.py. The trace is a CSV
file `seconds,price`, the price by hour and replica; the one in this folder is invented. Above `--limit` half of the
replicas leave, with `--notice` seconds of notice.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.predicted_autoscaler import PredictedAutoscaler
from benchmarks.preemption import EXAMPLE, endless_cluster
from operators.autoscaler.config import AutoscalingConfig, PriceLimit
from operators.autoscaler.prices import PriceTrace, parse_prices
from pipelines.simulate.prediction.world import PredictedWorld

TRACE = Path(__file__).with_name("spot_prices.csv")


@dataclass(frozen=True)
class Arm:
    """One run. `tokens` are emulated ones, `trained` the optimizer steps."""

    name: str
    tokens: int
    trained: int
    replica_hours: float
    cost: float
    lost: int
    decisions: tuple[tuple[float, int, str], ...]

    @property
    def cost_per_million(self) -> float:
        """The cost of a million tokens."""
        return 1e6 * self.cost / self.tokens


def measure(name: str, config_file: Path, trace: PriceTrace, options: argparse.Namespace) -> Arm:
    """Play one arm: `price` follows the trace; the others have a fixed number of replicas."""
    replicas = options.replicas if name != "half" else options.replicas // 2
    world = PredictedWorld(endless_cluster(config_file, options.seed, f"rollout.replicas={replicas}"))
    few = replicas // 2 if name == "price" else replicas
    scaling = AutoscalingConfig(
        "price",
        minimum=few,
        prices=(PriceLimit(options.limit, replicas),),
        price_file=str(options.trace),
        stable_s=60.0,
        cooldown_s=300.0,
        max_step=replicas,
    )
    scaler = PredictedAutoscaler(world, scaling, trace, replicas, options.notice)
    world.scheduler.at(60 * options.minutes, world.scheduler.stop)
    world.run()
    counts, decisions = scaler.departures.counts, tuple(scaler.changes)
    steps = len(world.training.steps)
    generated, hours = scaler.departures.generated, scaler.replica_hours
    return Arm(name, generated, steps, hours, scaler.cost, counts.lost_tokens, decisions)


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("config", nargs="?", type=Path, default=EXAMPLE)
    arguments.add_argument("--trace", type=Path, default=TRACE)
    arguments.add_argument("--minutes", type=float, default=60.0)
    arguments.add_argument("--replicas", type=int, default=4)
    arguments.add_argument("--limit", type=float, default=1.5, help="the highest price for all replicas")
    arguments.add_argument("--notice", type=float, default=120.0)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    trace = parse_prices(options.trace.read_text(encoding="utf-8"), str(options.trace))
    arms = [measure(name, options.config, trace, options) for name in ("all", "half", "price")]
    if options.json:
        print(json.dumps([{**asdict(arm), "cost_per_million": arm.cost_per_million} for arm in arms]))
        return
    console = Console(width=120)
    console.print(_table(arms, options.replicas))
    for at, target, reason in arms[-1].decisions:
        console.print(f"{at / 60:5.1f} min: {target} replicas: {reason}")


def _table(arms: Sequence[Arm], replicas: int) -> Table:
    table = Table(title=f"up to {replicas} replicas on a trace of spot prices")
    for column in ("replicas", "tokens", "steps", "replica hours", "cost", "cost of 1M tokens", "tokens lost"):
        table.add_column(column, justify="left" if column == "replicas" else "right")
    for arm in arms:
        table.add_row(
            arm.name,
            f"{arm.tokens:,}",
            str(arm.trained),
            f"{arm.replica_hours:.2f}",
            f"{arm.cost:.2f}",
            f"{arm.cost_per_million:.3f}",
            str(arm.lost),
        )
    return table


if __name__ == "__main__":
    main()
