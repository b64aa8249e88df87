"""The cost of losing replicas: one of eight processes with two emulated replicas each is killed repeatedly.

    python -m benchmarks.failover [--kills 10] [--every 40] [--json]

A run on the real Kafka and pipelines; `laminar run` restarts each process. For every kill the benchmark measures the
time until the replicas are back, from there the time until they have work, and the time until all replicas together
generate as many tokens/s as before, in units of the default heartbeat interval and heartbeat time-out. The run must end
by itself and pass its audit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.emulated_runs import emulated_run
from benchmarks.ended_runs import rows_of
from operators.placement.config import PlacementConfig
from operators.rollout.config import RolloutConfig
from pipelines.inspect.metrics_file import read_metrics
from pipelines.present.report.machine import describe_machine
from schemas.records import Assignment, Metric
from schemas.topics import INBOX

EXAMPLE = Path(__file__).parents[1] / "examples" / "emulated.toml"
PROCESSES, HOSTED = 8, 2
HEARTBEAT_S, TIMEOUT_S = RolloutConfig().heartbeat_s, PlacementConfig().heartbeat_timeout_s
LEVEL = 0.95
"""Generation has recovered when it reaches this share of its earlier rate."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill, in wall-clock seconds; infinite if the event did not occur before the next kill."""

    process: int
    back_s: float
    """Until the first heartbeat of the new process."""
    work_s: float
    """From there until its first assignment."""
    level_s: float
    """From there until generation has recovered."""


def changes(steps: int, seed: int) -> list[str]:
    """Changes to the example's configuration."""
    return [
        f"run.seed={seed}",
        "run.time_scale=5",
        f"rollout.processes={PROCESSES}",
        f"rollout.replicas={HOSTED}",
        f"rollout.heartbeat_s={HEARTBEAT_S}",
        f"placement.heartbeat_timeout_s={TIMEOUT_S}",
        "placement.repack_s=1",
        "experience.max_staleness=4",
        f"trainer.optimizer_steps={steps}",
        "trainer.emulation.step_s=[[0.0, 1.0], [1e6, 1.1]]",
    ]


class Killer:
    """Kills a rollout process of a run every `every_s` seconds, once the run trains."""

    def __init__(self, kills: int, every_s: float, seed: int) -> None:
        self.killed: list[tuple[float, int]] = []
        """Unix seconds and process number of each kill."""
        self._kills, self._every_s, self._random = kills, every_s, random.Random(seed)

    def __call__(self, run: Path, is_running: Callable[[], bool]) -> None:
        while is_running() and self._state(run).get("phase") != "training":
            time.sleep(0.1)
        for _ in range(self._kills):
            time.sleep(self._every_s)
            process = self._random.randrange(PROCESSES)
            pid = self._state(run).get("roles", {}).get(f"rollout-{process}", {}).get("pid")
            if pid is None or not is_running() or self._state(run)["phase"] != "training":
                return
            os.kill(pid, signal.SIGKILL)
            self.killed.append((time.time(), process))

    def _state(self, run: Path) -> dict:
        file = run / "state.json"
        return dict(json.loads(file.read_text())) if file.exists() else {}


def generation(heartbeats: Sequence[Metric]) -> list[tuple[float, float, float]]:
    """(from, to, tokens) of every replica between two heartbeats, in Unix seconds."""
    by_incarnation: dict[tuple[int, float], list[tuple[float, float]]] = defaultdict(list)
    for each in sorted(heartbeats, key=lambda each: each.measured_at):
        key = each.step, each.values["incarnation"]
        by_incarnation[key].append((each.measured_at / 1000, each.values["tokens_generated"]))
    return [(a[0], b[0], b[1] - a[1]) for key in by_incarnation.values() for a, b in pairwise(key) if b[0] > a[0]]


def rate(spans: Sequence[tuple[float, float, float]], begin: float, end: float) -> float:
    """Tokens/s of `spans` between `begin` and `end`."""
    overlaps = ((min(b, end) - max(a, begin), b - a, tokens) for a, b, tokens in spans if a < end and b > begin)
    return sum(tokens * overlap / length for overlap, length, tokens in overlaps) / (end - begin)


def measure_kills(
    killed: Sequence[tuple[float, int]], heartbeats: Sequence[Metric], assignments: Sequence[Assignment], every_s: float
) -> list[Kill]:
    """Measure each kill by the heartbeats and assignments of the run."""
    spans, kills = generation(heartbeats), []
    for at, process in killed:
        hosted = range(process * HOSTED, (process + 1) * HOSTED)
        incarnations = {each.step: each.values["incarnation"] for each in heartbeats if each.measured_at / 1000 <= at}
        new = [
            each
            for each in heartbeats
            if each.step in hosted and each.values["incarnation"] > incarnations[each.step] and "version" in each.values
        ]
        back = min((each.measured_at / 1000 for each in new), default=math.inf)
        work = [
            each.assigned_at / 1000
            for each in assignments
            if each.replica in hosted
            and each.incarnation > incarnations[each.replica]
            and each.assigned_at / 1000 >= at
        ]
        level = rate(spans, at - every_s / 2, at)
        ends = [back + TIMEOUT_S * tenth / 10 for tenth in range(1, int(10 * every_s / TIMEOUT_S))]
        reached = (end for end in ends if rate(spans, end - TIMEOUT_S, end) >= LEVEL * level)
        level_s = next(reached, math.inf) - back if math.isfinite(back) else math.inf
        kills.append(Kill(process, back - at, max(0.0, min(work, default=math.inf) - back), level_s))
    return kills


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--kills", type=int, default=10)
    arguments.add_argument("--every", type=float, default=40.0, help="seconds between two kills")
    arguments.add_argument("--steps", type=int, default=27, help="optimizer steps, enough for all kills")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--folder", type=Path, help="the folder of the run; by default a temporary one")
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    killer = Killer(options.kills, options.every, options.seed)
    with tempfile.TemporaryDirectory(prefix="laminar-failover-") as temporary:
        folder, name = (options.folder or Path(temporary)).absolute(), f"failover-{options.seed}"
        with emulated_run(EXAMPLE, name, folder, changes(options.steps, options.seed), killer) as (run, client):
            heartbeats = [each for each in read_metrics(run / "metrics.jsonl") if each.name == "replica"]
            assignments = rows_of(client, INBOX.name(name), Assignment)
            audit = json.loads((run / "audit.json").read_text())
    kills = measure_kills(killer.killed, heartbeats, assignments, options.every)
    if options.json:
        print(json.dumps({"kills": [asdict(each) for each in kills], "audit": audit}))
        return
    console = Console(width=110)
    console.print(_table(kills))
    console.print(f"trained {audit['trained']:,}, lost {audit['lost']}, trained twice {audit['trained_twice']}")
    console.print(describe_machine())


def _table(kills: Sequence[Kill]) -> Table:
    table = Table(
        title=f"{PROCESSES} processes of {HOSTED} replicas; heartbeat {HEARTBEAT_S} s, time-out {TIMEOUT_S} s"
    )
    for column in ("killed", "back after s", "work after heartbeats", "level after time-outs"):
        table.add_column(column, justify="left" if column == "killed" else "right")
    rows = [(f"rollout-{each.process}", each.back_s, each.work_s, each.level_s) for each in kills]
    middle = (statistics.median(column) for column in zip(*(row[1:] for row in rows), strict=True))
    for name, back, work, level in [*rows, ("median", *middle)]:
        table.add_row(name, f"{back:.1f}", f"{work / HEARTBEAT_S:.1f}", f"{level / TIMEOUT_S:.1f}")
    return table


if __name__ == "__main__":
    main()
