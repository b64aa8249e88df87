"""Seconds from the start of a read-only command to the first line of its output.

    python -m benchmarks.first_line

The run is the emulated example (16 replicas, six batches of 2,048 trajectories) on a Kafka of this machine. It has
ended before the measurement. Each round runs all commands, so that changes in the machine's speed affect all alike; the
first round warms files and broker and does not count. For comparison, the benchmark also measures a start of Python and
a start that imports kafka-python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.compare_commits import cpu_s
from benchmarks.emulated_runs import emulated_run
from infra.kafka.topic_reader import last_records
from pipelines.present.report.machine import describe_machine
from schemas.topics import TRAJECTORIES

EXAMPLE = Path("examples/emulated.toml")
FOLDER = Path("build/first-line")
RUN = "inspected"
GOAL_S = 1.0
LAMINAR = "from pipelines.cli.main import main; main()"
COMMANDS = (
    "topics list",
    "topics describe settled",
    "topics lag",
    "topics offsets settled",
    "topics tail trajectories",
    "topics get settled 0:0",
    "topics find trajectories",
    "topics stats settled",
    "topics dlq list",
    "trajectory TRAJECTORY",
    "lineage latest",
    "watch",
    "weights list",
    "weights show",
    "replicas",
    "relays",
    "plans",
)
STARTS = {"python": "print(1)", "python, import kafka": "import kafka; print(1)"}


def main() -> None:
    """Run the example, measure, print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    console = Console(stderr=options.json)
    console.print("running the emulated example: a minute or two")
    with emulated_run(EXAMPLE, RUN, FOLDER, []) as (_, client):
        name = last_records(client, TRAJECTORIES.name(RUN), 1)[-1].rows[-1].trajectory_id
        commands = {label: [sys.executable, "-c", code] for label, code in STARTS.items()}
        for command in COMMANDS:
            words = command.replace("TRAJECTORY", name).split()
            where = ["--run", RUN, "-b", client.bootstrap_servers]
            commands[f"laminar {command}"] = [sys.executable, "-c", LAMINAR, *words, *where]
        took = measure(commands, options.rounds)
    if options.json:
        print(json.dumps({"machine": describe_machine(), "seconds": took}, indent=1))
    else:
        show(took, console)


def measure(commands: Mapping[str, Sequence[str]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """For each command and round: seconds to the first line, and CPU seconds to the end."""
    took: dict[str, list[tuple[float, float]]] = {label: [] for label in commands}
    for number in range(rounds + 1):
        for label, command in commands.items():
            before = cpu_s()
            seconds = first_line(command)
            if number:
                took[label].append((seconds, cpu_s() - before))
    return took


def first_line(command: Sequence[str]) -> float:
    """Seconds until `command` prints a line. Raises RuntimeError if it prints none or fails."""
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.monotonic() - began
        _, errors = process.communicate()
    if not line or process.returncode:
        raise RuntimeError(f"{command[3:]} exited with {process.returncode}: {errors.decode()[-500:]}")
    return seconds


def show(took: Mapping[str, Sequence[tuple[float, float]]], console: Console) -> None:
    """Print the table."""
    machine = describe_machine()
    console.print(f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}")
    rounds = min(map(len, took.values()))
    table = Table(title=f"Seconds of {rounds} rounds; goal: less than {GOAL_S:g} to the first line")
    table.add_column("", no_wrap=True)
    for column in ("first line, median", "worst", "CPU to the end"):
        table.add_column(column, justify="right")
    for label, rows in took.items():
        seconds, cpu = [first for first, _ in rows], [used for _, used in rows]
        usual = statistics.median(seconds)
        cells = [f"{figure:.2f}" for figure in (usual, max(seconds), statistics.median(cpu))]
        table.add_row(label, *cells, style="bold red" if usual >= GOAL_S else "")
    console.print(table)


if __name__ == "__main__":
    main()
