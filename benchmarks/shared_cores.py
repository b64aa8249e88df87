"""How much slower models are on two busy cores: the plain loop alone on a core, and beside another on a second core.

    python -m benchmarks.shared_cores [--recipes A B] [--steps 40] [--rounds 4] [--json]

The loop is benchmarks/control.py with one thread. Two of them share caches, the memory bus and the clock rate, but no
lock, no broker and no queue. So the ratio of the seconds a batch beside the other loop to those alone, on the same core
and for the same batches, is the hardware's part of the slowdown of Laminar's models beside each other; what is beyond
it is software's. The other loop trains before, during and after all batches that are measured. Rounds alternate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from benchmarks.control import read_steps
from benchmarks.end_to_end import RECIPES
from benchmarks.measures import SETTLED_AFTER
from benchmarks.other_sides import CONTROL_MODULE
from benchmarks.processes import OthersWatch
from benchmarks.sides import LIMIT_S, Work, warm_start
from benchmarks.tables import print_rows
from pipelines.config import load_config, save_config
from pipelines.present.report.machine import describe_machine

FOLDER = Path("build/shared_cores")
ENDLESS = 1_000_000
"""Optimizer steps of the loop beside the measured one, which is stopped."""


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    arguments.add_argument("--steps", type=int, default=40, help="optimizer steps")
    arguments.add_argument("--rounds", type=int, default=4)
    arguments.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change one setting")
    arguments.add_argument("--folder", type=Path, default=FOLDER)
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("this needs two cores")
    os.sched_setaffinity(0, cores)
    others = OthersWatch()
    rows = [measure(name, cores, options) for name in options.recipes]
    title = f"{describe_machine()['cpu']}, {options.rounds} rounds of {options.steps} steps"
    print_rows(rows, title, options.json)
    print(f"other work: {others.share():.0%} of the CPU time; it must be little", file=sys.stderr)
    threads = f"threads of the physical core of core {cores[0]}: {_siblings(cores[0])}"
    Console(stderr=options.json).print(f"cores {cores[0]} and {cores[1]}; {threads}")


def measure(name: str, cores: Sequence[int], options: argparse.Namespace) -> dict[str, float | str]:
    """The row of recipe `name`: medians of seconds a batch alone and beside another loop, and of the rounds' ratios."""
    folder = options.folder.absolute()
    changes = [f'run.folder="{folder / "runs"}"', *options.set]
    work = Work(folder, name.lower(), load_config(RECIPES[name].example, changes))
    model = warm_start(work)
    files = []
    for loop, steps in (("measured", options.steps), ("other", ENDLESS)):
        files.append(folder / f"{work.name}-{loop}.toml")
        config = work.training(model)
        save_config(replace(config, trainer=replace(config.trainer, optimizer_steps=steps)), files[-1])
    measured, other = (Loop(file, model, core) for file, core in zip(files, cores, strict=True))
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(options.rounds):
        for beside in (False, True) if number % 2 == 0 else (True, False):
            with other.running() if beside else nullcontext():
                found[beside].append(measured.seconds_a_batch())
    ratio = statistics.median(b / a for a, b in zip(found[False], found[True], strict=True))
    alone, together = map(statistics.median, found.values())
    return {"recipe": name, "alone, s a batch": alone, "beside another": together, "ratio": ratio}


@dataclass(frozen=True)
class Loop:
    """The loop of the configuration `file` on one core."""

    file: Path
    model: Path
    core: int

    def seconds_a_batch(self) -> float:
        """Run it to its end; mean seconds of its steps after start-up. Raises RuntimeError if it fails or has none."""
        if self._start().wait(LIMIT_S):
            raise RuntimeError(f"the loop failed: see {self._out / 'log'}")
        return mean_step([line["ended"] for line in read_steps(self._steps)])

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which it trains, from before the begin to after the end. Raises RuntimeError if it does not."""
        process = self._start()
        try:
            deadline = time.monotonic() + LIMIT_S
            while process.poll() is None and not self._has_begun() and time.monotonic() < deadline:
                time.sleep(0.1)
            yield
            if process.poll() is not None or not self._has_begun():
                raise RuntimeError(f"the other loop did not run: see {self._out / 'log'}")
        finally:
            process.terminate()
            process.wait()

    @property
    def _out(self) -> Path:
        return self.file.with_suffix("")

    @property
    def _steps(self) -> Path:
        return self._out / "steps.jsonl"

    def _has_begun(self) -> bool:
        return self._steps.exists() and self._steps.stat().st_size > 0

    def _start(self) -> subprocess.Popen[bytes]:
        self._out.mkdir(parents=True, exist_ok=True)
        self._steps.unlink(missing_ok=True)
        files = [str(self.file), "--model", str(self.model), "--out", str(self._out), "--threads", "1"]
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self.core})  # inherited by the process
        try:
            with (self._out / "log").open("w") as log:
                return subprocess.Popen(
                    [sys.executable, "-m", CONTROL_MODULE, *files],
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    stdout=log,
                    stderr=log,
                )
        finally:
            os.sched_setaffinity(0, allowed)


def mean_step(ended: Sequence[float]) -> float:
    """Mean seconds of the steps after start-up; all `ended` at these times. Raises RuntimeError without such steps."""
    if len(ended) <= SETTLED_AFTER:
        raise RuntimeError(f"{len(ended)} steps were made; more than {SETTLED_AFTER} are needed")
    return (ended[-1] - ended[SETTLED_AFTER - 1]) / (len(ended) - SETTLED_AFTER)


def _siblings(core: int) -> str:
    file = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    return file.read_text().strip() if file.exists() else "unknown"


if __name__ == "__main__":
    main()
