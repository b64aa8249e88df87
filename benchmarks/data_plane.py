"""Score and experience as one job of a Flink cluster with two task managers, by the number of their shards.

    python -m benchmarks.data_plane
    python -m benchmarks.data_plane --shards 1 2 4 --trajectories 40000 --rounds 3

A real broker, a job manager, two task managers with a pool of workers beside them, all on loopback. For each number of
shards the job starts on empty topics; then trajectories are published, and the measurement ends when all are in
batches. CPU time is that of the workers, which run the steps, of the task managers, which run Flink, and of the broker,
each for a trajectory; `split` is the share of each worker. Shards compete for the cores of the machine, so their number
raises the throughput only up to these; the CPU time of a trajectory must not grow with it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from benchmarks.buffer_log import SAMPLES, example_trajectories
from benchmarks.flink_cluster import FlinkCluster, cpu_seconds, loopback
from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.kafka.producer import BoundedProducer
from infra.kafka.topic_reader import read_rows
from infra.runners.stopping import STOPPING
from operators.experience.config import ExperienceConfig
from operators.score.config import RewardSpec, ScoreConfig
from pipelines.config import Config, KafkaConfig, RunConfig
from pipelines.present.report.machine import describe_machine
from pipelines.roles import ALL_SHARDS, Role, RoleProcess, run_process
from pipelines.run.topics import make_topics
from schemas import records as r
from schemas.block import Block
from schemas.block_codec import encode_block
from schemas.codec import MAX_ROWS
from schemas.topics import EXPERIENCES, METRICS, TRAJECTORIES

TASKS = ("task1", "task2")
PARTITIONS = 4
LIMIT_S = 900.0
JOB = RoleProcess("score-and-experience", (Role("score", ALL_SHARDS), Role("experience", ALL_SHARDS)))


@dataclass(frozen=True)
class Measured:
    """One job. Microseconds of CPU time a trajectory: of workers, task managers, broker. `split`: shares by worker."""

    shards: int
    trajectories: int
    per_second: float
    workers: float
    tasks: float
    broker: float
    split: tuple[float, ...]


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    arguments.add_argument("--trajectories", type=int, default=40_000)
    arguments.add_argument("--tokens", type=int, default=512, help="tokens of one trajectory; an eighth are its prompt")
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    found = list(measure(options))
    if options.json:
        print(json.dumps([asdict(each) for each in found]))
        return
    table = Table(
        "shards", "trajectories/s", "workers, µs", "Flink, µs", "broker, µs", "split", title=describe_machine()
    )
    for each in found:
        figures = (each.per_second, each.workers, each.tasks, each.broker)
        split = " ".join(f"{share:.0%}" for share in each.split)
        table.add_row(str(each.shards), *(f"{figure:,.0f}" for figure in figures), split)
    Console().print(table)


def measure(options: argparse.Namespace) -> Iterator[Measured]:
    """The medians of each number of shards, whose jobs run by turns."""
    scratch = tempfile.TemporaryDirectory(prefix="laminar-data-plane-", ignore_cleanup_errors=True)
    with scratch as folder, start_broker(BrokerConfig(Path(folder) / "kafka")) as broker:
        spread = {"cluster.evenly-spread-out-slots": "true"}  # else Flink may give one task manager both of two shards
        cluster = FlinkCluster(Path(folder) / "flink", TASKS, loopback(TASKS), slots=2, configuration=spread)
        try:
            cluster.start()
            found: dict[int, list[Measured]] = {shards: [] for shards in options.shards}
            for number in range(options.rounds):
                for shards in options.shards:
                    config = _config(Path(folder), broker, f"r{number}-{shards}", shards)
                    found[shards].append(_Job(config, cluster, broker).measure(options.trajectories, options.tokens))
        finally:
            cluster.stop()
    return map(_median, found.values())


def _median(jobs: Sequence[Measured]) -> Measured:
    names = ("per_second", "workers", "tasks", "broker")
    return replace(jobs[0], **{name: statistics.median(getattr(each, name) for each in jobs) for name in names})


def _config(folder: Path, broker: Broker, run: str, shards: int) -> Config:
    return Config(
        run=RunConfig(run, folder / "runs"),
        kafka=KafkaConfig(bootstrap_servers=broker.bootstrap_servers, partitions=PARTITIONS),
        score=ScoreConfig((RewardSpec("length", options={"target": 10, "limit": 200}),), answer="whole", shards=shards),
        experience=ExperienceConfig(global_batch=512, shards=shards),
    )


class _Job:
    def __init__(self, config: Config, cluster: FlinkCluster, broker: Broker) -> None:
        self._config, self._cluster, self._broker = config, cluster, psutil.Process(broker.pid)
        self._client = config.kafka.client()

    def measure(self, count: int, tokens: int) -> Measured:
        """Run the job until `count` trajectories, rounded to whole batches, are batched."""
        shards = self._config.score.shards
        if left := self._cluster.jobs():
            raise RuntimeError(f"jobs {', '.join(left)} have not ended: they have slots, and their workers are counted")
        make_topics(self._config)
        # One worker for each shard of a task manager.
        options = [*self._cluster.options, f"--parallelism={shards}", f"--sdk_worker_parallelism={max(1, shards // 2)}"]
        STOPPING.clear()
        job = threading.Thread(target=run_process, args=(self._config, JOB, "flink", options), name="job")
        job.start()
        try:
            # The first batch: all shards have started, and their code is loaded.
            written = self._write(0, 4 * MAX_ROWS * PARTITIONS, tokens)
            self._wait(written, job)
            before, began = self._cpu(), time.monotonic()
            total = self._write(written, count, tokens)
            self._wait(total, job)
            took, after = time.monotonic() - began, self._cpu()
        finally:
            STOPPING.set()
            job.join()
        done = total - written
        spent = [sum(after[kind].values()) - sum(before[kind].values()) for kind in ("workers", "tasks", "broker")]
        shares = [after["workers"][pid] - before["workers"].get(pid, 0.0) for pid in sorted(after["workers"])]
        split = tuple(share / spent[0] for share in shares)
        return Measured(shards, done, done / took, *(each / done * 1e6 for each in spent), split)

    def _cpu(self) -> dict[str, dict[int, float]]:
        """CPU seconds of each process by its kind."""
        kinds = {
            "workers": self._cluster.workers(),
            "tasks": [self._cluster.processes[name] for name in TASKS],
            "broker": [self._broker],
        }
        return {
            kind: {each.pid: cpu_seconds([each, *each.children(recursive=True)]) for each in found}
            for kind, found in kinds.items()
        }

    def _write(self, first: int, count: int, tokens: int) -> int:
        """Publish at least `count` trajectories after the `first`, records of one partition each; the new total."""
        template = Block.of(example_trajectories(tokens))
        topic, groups = TRAJECTORIES.name(self._config.run.name), MAX_ROWS // SAMPLES
        with BoundedProducer(self._client) as producer:
            written = first
            while written < first + count:
                base = written // SAMPLES
                for partition in range(PARTITIONS):
                    numbers = base + partition + PARTITIONS * (np.arange(MAX_ROWS) // SAMPLES)
                    block = _renumbered(template, numbers)
                    for value, headers in encode_block(block):
                        producer.send(topic, value, key=b"p", headers=headers, partition=partition)
                written += groups * SAMPLES * PARTITIONS
        return written

    def _wait(self, trajectories: int, job: threading.Thread) -> None:
        """Wait until all whole batches of `trajectories` are committed. Raises RuntimeError."""
        deadline, batches = time.monotonic() + LIMIT_S, trajectories // self._config.experience.global_batch
        while (made := self._batches()) < batches - 1:  # the last one may wait for groups of other shards
            if not job.is_alive() or time.monotonic() > deadline:
                raise RuntimeError(f"{made} of {batches} batches were made")
            time.sleep(0.2)

    def _batches(self) -> int:
        """The batches that every shard has written its part of."""
        counts = dict.fromkeys(range(self._config.experience.shards), 0)
        for row in read_rows(self._client, METRICS.name(self._config.run.name), r.Metric):
            if row.name == EXPERIENCES.short_name.removesuffix("s"):
                shard = int(row.values.get("shard", 0))
                counts[shard] = max(counts[shard], row.step + 1)
        return min(counts.values())


def _renumbered(template: Block, numbers: np.ndarray) -> Block:
    batch = template.batch
    for name, values in {"prompt.number": numbers, "member": np.arange(len(numbers)) % SAMPLES}.items():
        batch = batch.set_column(batch.schema.get_field_index(name), name, pa.array(values, pa.int64()))
    return Block(r.Trajectory, batch)


if __name__ == "__main__":
    main()
