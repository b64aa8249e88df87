"""Seconds until a run's first finished trajectory, and from its end, by signal, until nothing of it is left.

    python -m benchmarks.startup

A first run, which does not count, caches the warm start and brings the files into the page cache. "First trajectory" is
its finished_at. "Gone" is when no process of the run is alive and no weights are left in shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.ended_runs import read_ended
from benchmarks.measures import median
from benchmarks.processes import OthersWatch
from infra.processes import is_running
from pipelines.present.report.machine import describe_machine
from schemas.records import Trajectory
from schemas.topics import TRAJECTORIES

EXAMPLE = Path("examples/chain_sum.toml")
FOLDER = Path("build/startup")
ENDINGS = {"Ctrl-C": signal.SIGINT, "kill -9": signal.SIGKILL}
LIMIT_S = 900.0
TRAINED = 5
"""Optimizer steps after which a run is stopped."""


@dataclass(frozen=True)
class Measured:
    """One run, in seconds: its phases, from start to first trajectory, and from the signal until nothing is left."""

    phases: dict[str, float]
    first_trajectory: float
    gone: float
    others: float


def main() -> None:
    """Measure, then print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--runs", type=int, default=3, help="runs per signal")
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    console = Console(stderr=options.json)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a script ignores it
    shutil.rmtree(FOLDER / "runs", ignore_errors=True)
    console.print("warm-up run")
    _measure("first", signal.SIGINT)
    found: dict[str, list[Measured]] = {}
    for ending, number in ENDINGS.items():
        for run in range(options.runs):
            console.print(f"{ending}, run {run}")
            found.setdefault(ending, []).append(_measure(f"{number.name.lower()}-{run}", number))
    if options.json:
        cells = {ending: [asdict(each) for each in runs] for ending, runs in found.items()}
        print(json.dumps({"machine": describe_machine(), "runs": cells}, indent=1))
    else:
        _print(found, console)


def _measure(name: str, ending: signal.Signals) -> Measured:
    others = OthersWatch()
    folder, started = (FOLDER / "runs" / name).absolute(), time.time()
    command = [Path(sys.executable).with_name("laminar"), "run", EXAMPLE, "--name", name]
    command += ["--set", f"run.folder={folder.parent}"]
    with (FOLDER / f"{name}.log").open("w") as log:
        run = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        _until(lambda: _trained(folder) >= TRAINED, run, log.name)
        state = json.loads((folder / "state.json").read_text("utf-8"))
        family = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
        used = others.share()  # measured now: descendants that outlive a killed run count as others
        signalled = time.monotonic()
        run.send_signal(ending)
        run.wait(LIMIT_S)
        _until(lambda: not _left(name, family), None, log.name)
        gone = time.monotonic() - signalled
    finally:
        run.kill()
        run.wait()
    return Measured(state["phases"], _first_trajectory(folder, name) - started, gone, used)


def _until(condition: Callable[[], Any], run: subprocess.Popen[bytes] | None, log: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline or (run is not None and run.poll() is not None):
            raise RuntimeError(f"the run ended early, or the condition did not hold within {LIMIT_S:g} s: see {log}")
        time.sleep(0.02)


def _trained(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_text("utf-8").count('"name":"trainer"') if metrics.exists() else 0


def _left(name: str, family: list[psutil.Process]) -> list[str]:
    alive = [str(p.pid) for p in family if is_running(p)]
    return alive + [str(path) for path in Path("/dev/shm").glob(f"laminar-{name}*")]


def _first_trajectory(folder: Path, run: str) -> float:
    """The finish time of the first trajectory (Unix seconds)."""
    return min(trajectory.finished_at for trajectory in read_ended(folder, run, TRAJECTORIES, Trajectory)) / 1000


def _print(found: dict[str, list[Measured]], console: Console) -> None:
    machine = describe_machine()
    console.print(f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}")
    everything = [each for runs in found.values() for each in runs]
    table = Table(title=f"Seconds; median and worst of {len(everything)} runs (of {len(everything) // 2} each ending)")
    for column in ("phase", "median", "worst", "goal"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    rows = {"start to first trajectory": ([each.first_trajectory for each in everything], "≤ 10")}
    for phase in ("broker", "warm start", "starting"):
        rows[f"  of which {phase}"] = ([each.phases[phase] for each in everything], "")
    rows |= {f"{ending} to nothing left": ([each.gone for each in runs], "≤ 1") for ending, runs in found.items()}
    for what, (seconds, wanted) in rows.items():
        table.add_row(what, f"{median(seconds):.1f}", f"{max(seconds):.1f}", wanted)
    console.print(table)
    if (busy := max(each.others for each in everything)) > 0.05:
        console.print(f"UNRELIABLE: other processes used up to {busy:.0%} of the machine")


if __name__ == "__main__":
    os.makedirs(FOLDER, exist_ok=True)
    main()
