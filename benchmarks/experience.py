"""Trajectories a second through the experience buffer: experiences on Kafka → buffer → batches on Kafka.

    python benchmarks/experience.py --log 1000 10000 100000

A real broker, the real pipeline on the embedded runner, everything committed in transactions. `write` is what it takes
to encode and send experiences (score's way out, its verifiers apart). `buffer` is from the session, before anything is
fetched, to the last batch that a read_committed reader sees. `--log` gives how many trajectories the buffer's log holds
when the next `--trajectories` are measured: the cost of each must not grow with it. CPU time is of this process and of
the broker, so it tells of a machine that has other work, too. Beside it stand PipelineRL's file streams and
TransferQueue, which are not durable: measured here where `make streams-env` has been run, else as published.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.kafka.producer import BoundedProducer
from infra.kafka.reading import read_topic
from infra.kafka.session import SESSIONS
from infra.runners.run import run_pipeline
from infra.runners.stopping import STOPPING
from operators.experience.config import ExperienceConfig
from operators.io.shards import close_shards
from pipelines import experience
from pipelines.config import Config, KafkaConfig, RunConfig
from pipelines.run.topics import make_topics
from schemas import records as r
from schemas.block import Block
from schemas.codec import MAX_ROWS, encode_block
from schemas.columns import flags, floats, token_ids
from schemas.topics import EXPERIENCES, METRICS, group_name

SAMPLES = 8
PUBLISHED = (
    "On other machines, as published: PipelineRL's files 34.8k writes and 10.0k reads a second, not durable; "
    "TransferQueue 8.6k puts and 7.5k gets, in memory."
)
OTHERS = Path(".venv-streams/bin/python")
"""The environment in which the others run."""
LIMIT_S = 900.0


@dataclass(frozen=True)
class Measured:
    """One slice: trajectories a second, and CPU microseconds a trajectory of the process and of the broker."""

    stage: str
    log: int
    trajectories: int
    per_second: float
    cpu_us: float
    broker_cpu_us: float


class Feeder:
    """Writes experiences of dense prompt numbers, `tokens` of prompt and response together."""

    def __init__(self, config: Config, tokens: int) -> None:
        self._config, self._topic = config, EXPERIENCES.name(config.run.name)
        self.written = 0
        self._template = _template(tokens)

    def write(self, count: int) -> int:
        """Write `count` trajectories or a few more, whole groups in full records; how many."""
        before = self.written
        with BoundedProducer(self._config.kafka.client()) as producer:
            while self.written - before < count:
                for value, headers in encode_block(self._next()):
                    producer.send(self._topic, value, key=b"p", headers=headers, partition=0)
        return self.written - before

    def _next(self) -> Block:
        rows = np.arange(self.written, self.written + MAX_ROWS)
        self.written += MAX_ROWS
        changed = {"trajectory.prompt.number": rows // SAMPLES, "trajectory.member": rows % SAMPLES}
        batch = self._template.batch
        for name, values in changed.items():
            batch = batch.set_column(batch.schema.get_field_index(name), name, pa.array(values, pa.int64()))
        return Block(r.Experience, batch)


def _template(tokens: int) -> Block:
    rng = np.random.default_rng(0)
    asked = tokens // 8
    answered = tokens - asked
    version = r.PolicyVersion(1, 0)
    sampling = r.Sampling(1.0, 1.0, 0, answered, (0,), 0)
    rows = []
    for row in range(MAX_ROWS):
        ids = token_ids(rng.integers(0, 32_000, asked).astype(np.int32))
        prompt = r.Prompt(row // SAMPLES, "train", "benchmark", "x" * 64, ids, '{"answer": "1"}', SAMPLES, sampling)
        response = r.Response(
            token_ids(rng.integers(0, 32_000, answered).astype(np.int32)),
            floats(-rng.random(answered, np.float32)),
            flags(np.ones(answered, bool)),
        )
        spans = (r.VersionSpan(version, answered),)
        made = r.Trajectory(
            prompt, row % SAMPLES, 1, 1, 0, 1, response, "y" * 64, spans, version, "stop", None, 0, None, 0
        )
        components = (
            r.RewardComponent("exact", float(row % 2), 1.0),
            r.RewardComponent("accuracy", float(row % 2), 0.0),
        )
        rows.append(r.Experience(made, float(row % 2), components, None, 0))
    return Block.of(rows)


class Sample(NamedTuple):
    """Batches committed by then, and seconds: of the clock, of this process's CPU time, of the broker's."""

    batches: int
    at: float
    own: float
    brokers: float


class Watch(threading.Thread):
    """Looks at the committed end of the metrics topic, which has one record a batch, until `batches` are there."""

    def __init__(self, config: Config, broker: Broker, batches: int) -> None:
        super().__init__(daemon=True)
        self._config, self._broker = config, psutil.Process(broker.pid)
        self._batches = batches
        self.samples: list[Sample] = []
        self.done = False

    def run(self) -> None:
        limit = threading.Timer(LIMIT_S, STOPPING.set)
        limit.start()
        group = group_name(self._config.run.name, "experience")
        while SESSIONS.get(group) is None and not STOPPING.wait(0.002):
            pass
        self._look(0)
        topic = METRICS.name(self._config.run.name)
        for record in read_topic(self._config.kafka.client(), topic, follow=True):
            self._look(1 + record.rows[-1].step)
            if self.samples[-1].batches >= self._batches:
                break
        self.done = True
        limit.cancel()
        STOPPING.set()

    def _look(self, batches: int) -> None:
        broker = self._broker.cpu_times()
        self.samples.append(Sample(batches, time.monotonic(), time.process_time(), broker.user + broker.system))


def drain(config: Config, broker: Broker, batches: int) -> list[Sample]:
    """Run the pipeline until `batches` global batches are committed. Raises RuntimeError if they do not come."""
    STOPPING.clear()
    watch = Watch(config, broker, batches)
    watch.start()
    run_pipeline(partial(experience.build, config=config), close=close_shards)
    watch.join(10)
    if not watch.done:
        raise RuntimeError(f"only {watch.samples[-1].batches} of {batches} batches came in {LIMIT_S:g} s")
    return watch.samples


def measure(config: Config, broker: Broker, tokens: int, count: int, logs: list[int]) -> Iterator[Measured]:
    """For each log length: bring the buffer's log to it, then measure `count` more."""
    feeder = Feeder(config, tokens)
    size = config.experience.global_batch
    for log in logs:
        if log > feeder.written:
            feeder.write(log - feeder.written)
            drain(config, broker, feeder.written // size)
        held = feeder.written
        process = psutil.Process(broker.pid)
        before = (time.monotonic(), time.process_time(), sum(process.cpu_times()[:2]))
        written = feeder.write(count)
        after = (time.monotonic(), time.process_time(), sum(process.cpu_times()[:2]))
        seconds, own, theirs = (b - a for a, b in zip(before, after, strict=True))
        yield Measured("write", held, written, written / seconds, own / written * 1e6, theirs / written * 1e6)
        samples = drain(config, broker, feeder.written // size)
        first, last = samples[0], samples[-1]
        through = (last.batches - held // size) * size
        own, theirs = last.own - first.own, last.brokers - first.brokers
        rate = through / (last.at - first.at)
        yield Measured("buffer", held, through, rate, own / through * 1e6, theirs / through * 1e6)


@contextmanager
def _running(folder: Path, options: Any) -> Iterator[tuple[Config, Broker]]:
    with start_broker(BrokerConfig(folder)) as broker:
        config = Config(
            run=RunConfig(name="benchmark", folder=folder),
            kafka=KafkaConfig(bootstrap_servers=broker.bootstrap_servers),
            experience=ExperienceConfig(global_batch=options.global_batch),
        )
        make_topics(config)
        yield config, broker


def measure_others(tokens: int, count: int) -> list[tuple[str, float]]:
    """What the others do a second, on this machine; nothing where they are not installed."""
    if not OTHERS.exists():
        return []
    script = str(Path(__file__).parent / "streams" / "others.py")
    command = [str(OTHERS), script, "--trajectories", str(count), "--tokens", str(tokens)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [(f"{each['what']}: {each['way']}", each["per_second"]) for each in json.loads(answer.splitlines()[-1])]


def machine() -> str:
    """The processor's name and how many cores of it there are."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{name}, {psutil.cpu_count()} cores"


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--trajectories", type=int, default=100_000, help="to measure at each log length")
    arguments.add_argument("--tokens", type=int, default=512, help="of one trajectory, an eighth of them its prompt")
    arguments.add_argument("--log", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    arguments.add_argument("--global-batch", type=int, default=512)
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="laminar-benchmark-") as folder, _running(Path(folder), options) as run:
        found = list(measure(*run, options.tokens, options.trajectories, options.log))
    others = measure_others(options.tokens, options.trajectories)
    if options.json:
        print(json.dumps([*map(asdict, found), *({"stage": what, "per_second": rate} for what, rate in others)]))
        return
    table = Table(title=f"{options.tokens} tokens a trajectory, global batch {options.global_batch}, one partition")
    for name in ("stage", "in the log", "trajectories", "a second", "CPU µs each", "broker's CPU µs each"):
        table.add_column(name, justify="right")
    for each in found:
        figures = f"{each.per_second:,.0f}", f"{each.cpu_us:.0f}", f"{each.broker_cpu_us:.0f}"
        table.add_row(each.stage, f"{each.log:,}", f"{each.trajectories:,}", *figures)
    for what, rate in others:
        table.add_row(what, "", f"{options.trajectories:,}", f"{rate:,.0f}", "", "")
    console = Console(width=120)
    console.print(table)
    console.print(f"Measured on {machine()}." if others else f"Measured on {machine()}. {PUBLISHED}")


if __name__ == "__main__":
    main()
