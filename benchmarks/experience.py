"""Trajectories/s through the experience buffer: experiences on Kafka → buffer → batches on Kafka.

    python -m benchmarks.experience
    python -m benchmarks.experience --tokens 64 --log 1000 1000000 --trajectories 50000 --rounds 5

It uses a real broker and the real pipeline on the embedded runner; everything is committed in transactions. Stage
`write` encodes and publishes experiences, as score does after its verifiers. Stage `buffer` lasts from the session's
start, before the first fetch, to the last batch that a read_committed consumer receives. Stage `fold` is the buffer
alone, without Kafka, codec and Beam.

`--log` is the number of trajectories that the buffer processed before: the cost per trajectory must not grow with it.
The logs are filled first and then measured in turn, `--rounds` times, so that other work on the machine affects all
alike. A log that has grown by a tenth is replaced. Figures are medians; CPU time is of this process and of the broker;
`to the first` is the ratio of a stage's CPU time to that at the first log length.

PipelineRL's file streams and TransferQueue, which are not durable, are measured too after `make streams-env`;
otherwise their published figures are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.buffer_log import BufferLog, InMemory, Measured, OnKafka
from infra.kafka.broker import BrokerConfig, start_broker
from infra.runners.garbage_collection import reduce_gc_frequency
from operators.experience.config import ExperienceConfig
from pipelines.config import Config, KafkaConfig, RunConfig
from pipelines.present.report.machine import describe_machine

PUBLISHED = (
    "Published figures of other machines: PipelineRL's files, not durable, 34.8k writes/s and 10.0k reads/s; "
    "TransferQueue, in memory, 8.6k puts/s and 7.5k gets/s."
)
OTHERS = Path(".venv-streams/bin/python")
"""The virtual environment of PipelineRL's streams and TransferQueue."""
GROWN = 1.1
"""A log may grow by this factor and still count as one of its length."""


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument(
        "--trajectories", type=int, default=100_000, help="trajectories to measure at each log length"
    )
    arguments.add_argument("--tokens", type=int, default=512, help="tokens of one trajectory; an eighth are its prompt")
    arguments.add_argument("--log", type=int, nargs="+", default=[1_000])
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--global-batch", type=int, default=512)
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    reduce_gc_frequency()  # as a pipeline does
    found = list(measure(options))
    others = measure_others(options.tokens, options.trajectories)
    if options.json:
        print(json.dumps([*map(asdict, found), *({"stage": what, "per_second": rate} for what, rate in others)]))
    else:
        show(found, others, options)


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """The medians of all stages, at every log length."""
    yield from in_turn(lambda _: InMemory(options.tokens, options.global_batch), options)
    scratch = tempfile.TemporaryDirectory(prefix="laminar-benchmark-")
    with scratch as folder, start_broker(BrokerConfig(Path(folder))) as broker:
        config = Config(
            run=RunConfig(folder=Path(folder)),
            kafka=KafkaConfig(bootstrap_servers=broker.bootstrap_servers),
            experience=ExperienceConfig(global_batch=options.global_batch),
        )
        yield from in_turn(lambda number: OnKafka(config, f"log-{number}", broker, options.tokens), options)


def in_turn(begin: Callable[[int], BufferLog], options: argparse.Namespace) -> Iterator[Measured]:
    """Medians of logs of all lengths, measured in turn; `begin` starts the log of a number."""
    logs: dict[int, BufferLog] = {}
    found: dict[tuple[str, int], list[Measured]] = {}
    started = 0
    for _ in range(options.rounds):
        for length in options.log:
            if length not in logs or logs[length].written > max(GROWN * length, length + 1000):
                logs[length] = begin(started)
                started += 1
                logs[length].extend(length)
        for length in options.log:
            for each in logs[length].measure(options.trajectories):
                found.setdefault((each.stage, length), []).append(each)
    return map(median, found.values())


def median(slices: list[Measured]) -> Measured:
    """The median of each figure of one stage's slices."""
    first, *_ = slices
    numbers = {
        field.name: type(getattr(first, field.name))(statistics.median(getattr(each, field.name) for each in slices))
        for field in fields(Measured)
        if field.name != "stage"
    }
    return Measured(first.stage, **numbers)


def measure_others(tokens: int, count: int) -> list[tuple[str, float]]:
    """Trajectories/s of the other systems on this machine; empty if they are not installed."""
    if not OTHERS.exists():
        return []
    script = str(Path(__file__).parent / "streams" / "others.py")
    command = [str(OTHERS), script, "--trajectories", str(count), "--tokens", str(tokens)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [
        (f"{each['system']}: {each['operation']}", each["per_second"]) for each in json.loads(answer.splitlines()[-1])
    ]


def show(found: list[Measured], others: list[tuple[str, float]], options: argparse.Namespace) -> None:
    """Print the table."""
    table = Table(title=f"{options.tokens} tokens a trajectory, global batch {options.global_batch}, one partition")
    names = ("stage", "in the log", "trajectories", "per second", "CPU µs each", "to the first", "broker CPU µs each")
    for name in names:
        table.add_column(name, justify="right")
    firsts: dict[str, float] = {}
    for each in found:
        ratio = each.cpu_us / firsts.setdefault(each.stage, each.cpu_us)
        figures = f"{each.per_second:,.0f}", f"{each.cpu_us:.1f}", f"{ratio:.2f}", f"{each.broker_cpu_us:.1f}"
        table.add_row(each.stage, f"{each.log:,}", f"{each.trajectories:,}", *figures)
    for what, rate in others:
        table.add_row(what, "", f"{options.trajectories:,}", f"{rate:,.0f}", "", "", "")
    console, machine = Console(width=120), describe_machine()
    console.print(table)
    here = f"{machine['cores']} cores of {machine['cpu']}; medians of {options.rounds}."
    console.print(here if others else f"{here} {PUBLISHED}")


if __name__ == "__main__":
    main()
