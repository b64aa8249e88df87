"""The cost of preemptions: a random rollout vanishes every minute, without notice or with it, in a predicted cluster.

    python -m benchmarks.preemption [CONFIG.toml] [--minutes 10] [--every 60] [--replace 30] [--seed 0] [--json]

Real placement and replicas in virtual time, with emulated engines (pipelines/simulate/prediction): by default 16
replicas of a 32B model. Each preempted replica is replaced `--replace` seconds after its end. After the measured
minutes the preemptions stop, and all trajectories that were assigned before must finish. Fails if one does not, or if
more than 5 % of the generated tokens are lost: generated, and generated again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.predicted_departures import Preemptions
from pipelines.config import load_config
from pipelines.simulate.prediction.cluster import Cluster
from pipelines.simulate.prediction.world import PredictedWorld

EXAMPLE = Path(__file__).parents[1] / "examples" / "emulated.toml"
ARMS = ("calm", "no notice", "30 s notice", "120 s notice")
MAX_LOST = 0.05
SETTLE_S = 600.0
"""How long after the last preemption all trajectories before it must have finished."""


@dataclass(frozen=True)
class Arm:
    """One run. Tokens are emulated ones."""

    name: str
    preempted: int
    generated: int
    lost: int
    trajectories: int
    moved: int
    resumed: int
    unfinished: int

    @property
    def lost_share(self) -> float:
        """Lost tokens of all that were generated."""
        return self.lost / self.generated


def endless_cluster(file: Path, seed: int, *changes: str) -> Cluster:
    """The cluster of the configuration in `file` with `changes`, in its own clock, whose run does not end."""
    always = [f"run.seed={seed}", "run.time_scale=1", "placement.repack_s=5", "rollout.heartbeat_s=1"]
    return Cluster(load_config(file, [*always, "trainer.optimizer_steps=1000000", *changes]))


def measure(name: str, config_file: Path, seconds: float, every_s: float, restart_s: float, seed: int) -> Arm:
    """Play one arm for `seconds`, with a preemption every `every_s`."""
    world = PredictedWorld(endless_cluster(config_file, seed))
    notice_s = 0.0 if name in ("calm", "no notice") else float(name.partition(" ")[0])
    preemptions = Preemptions(world, every_s if name != "calm" else 10**9, notice_s, restart_s, seed)
    found: list[tuple[int, int]] = []

    def read() -> None:
        found.append((preemptions.departures.generated, world.measurement.trajectories))
        preemptions.stop()

    world.scheduler.at(seconds, read)
    world.scheduler.at(seconds + SETTLE_S, world.scheduler.stop)
    world.run()
    ((generated, trajectories),) = found
    counts, moves = preemptions.departures.counts, world.measurement.moves
    resumed, unfinished = moves["resume"] + moves["failover"], world.measurement.unfinished(seconds)
    moved = moves["hand_over"]
    return Arm(name, counts.ended, generated, counts.lost_tokens, trajectories, moved, resumed, unfinished)


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("config", nargs="?", type=Path, default=EXAMPLE)
    arguments.add_argument("--minutes", type=float, default=10.0)
    arguments.add_argument("--every", type=float, default=60.0, help="seconds between two preemptions")
    arguments.add_argument("--replace", type=float, default=30.0, help="seconds until a replica is replaced")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    seconds = 60 * options.minutes
    arms = [measure(name, options.config, seconds, options.every, options.replace, options.seed) for name in ARMS]
    if options.json:
        print(json.dumps([{**asdict(arm), "lost_share": arm.lost_share} for arm in arms]))
    else:
        Console(width=120).print(_table(arms))
    failed = [arm.name for arm in arms if arm.unfinished or arm.lost_share > MAX_LOST]
    if failed:
        sys.exit(f"lost trajectories, or more than {MAX_LOST:.0%} of the tokens: {', '.join(failed)}")


def _table(arms: Sequence[Arm]) -> Table:
    table = Table(title="preemptions of a predicted cluster")
    columns = ("arm", "preempted", "tokens lost", "generated", "trajectories", "moved", "resumed", "unfinished")
    for column in columns:
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm in arms:
        table.add_row(
            arm.name,
            str(arm.preempted),
            f"{100 * arm.lost_share:.2f} %",
            f"{100 * arm.generated / arms[0].generated:.1f} % of calm",
            f"{100 * arm.trajectories / arms[0].trajectories:.1f} % of calm",
            f"{arm.moved:,}",
            f"{arm.resumed:,}",
            str(arm.unfinished),
        )
    return table


if __name__ == "__main__":
    main()
