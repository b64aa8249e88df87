"""Megabytes a second from a topic to Parquet, and records a second through `laminar topics find` and `tail`.

    python -m benchmarks.export --trajectories 8000 --tokens 4096 --records 200000

A real broker and the real pipeline on the embedded runner. `export` counts from the session to the last file in its
place: Parquet bytes, the log's bytes beside them, and CPU time of this process and of the broker, so it tells of a
machine that has other work, too. `find` reads small records, one a Kafka record, and decodes and filters all; `tail`
prints all of them as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from benchmarks.buffer_log import Experiences
from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.kafka.producer import BoundedProducer
from infra.kafka.ranges import partition_ranges
from infra.runners.garbage_collection import reduce_gc_frequency
from infra.runners.run import run_pipeline
from operators.export.columns import row_schema
from operators.export.config import Contents, ExportConfig
from operators.export.folder import ExportFolder
from operators.export.verify import check_manifests, verify
from operators.export.where import parse_where
from operators.io.shards import close_shards
from pipelines.config import Config, KafkaConfig, RunConfig, parse_config
from pipelines.export import build
from pipelines.inspect.log.chunks import read_chunks
from pipelines.present.output import RowOutput, show
from pipelines.present.record_text import TAIL_COLUMNS, as_items
from pipelines.run.topics import make_topics
from schemas.block_codec import encode_block
from schemas.codec import encode
from schemas.records import Settled
from schemas.topics import EXPERIENCES, SETTLED


@dataclass
class Took:
    """Seconds of wall, of this process's CPU, and of the broker's."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    broker_cpu_s: float = 0.0


@contextmanager
def measured(broker: Broker) -> Iterator[Took]:
    """Fills in what the block took."""
    other, took = psutil.Process(broker.pid), Took()
    before, ours = other.cpu_times(), time.process_time()
    began = time.monotonic()
    yield took
    after = other.cpu_times()
    took.wall_s, took.cpu_s = time.monotonic() - began, time.process_time() - ours
    took.broker_cpu_s = after.user + after.system - before.user - before.system


def export(config: Config, broker: Broker, folder: Path, trajectories: int, tokens: int) -> dict[str, float]:
    """Write experiences, export them, and prove the export."""
    client, run, made = config.kafka.client(), config.run.name, Experiences(tokens)
    with BoundedProducer(client) as producer:
        while made.made < trajectories:
            for value, headers in encode_block(made.next()):
                producer.send(EXPERIENCES.name(run), value, key=b"p", headers=headers, partition=0)
    contents = Contents(
        run, EXPERIENCES.short_name, starts=dict.fromkeys(partition_ranges(client, EXPERIENCES.name(run)), 0)
    )
    ExportFolder(folder, contents).close()
    with measured(broker) as took:
        asked = ExportConfig(folder, contents)
        run_pipeline(partial(build, config=asked, client=client), "embedded", (), close_shards)
    proof = check_manifests(folder)
    log = sum(held.stat().st_size for held in (folder.parent / "kafka").rglob(f"{EXPERIENCES.name(run)}-*/*.log"))
    assert not verify(folder).problems
    return {
        "rows": proof.rows,
        "parquet_mb": proof.bytes / 1e6,
        "log_mb": log / 1e6,
        "wall_s": took.wall_s,
        "cpu_s": took.cpu_s,
        "broker_cpu_s": took.broker_cpu_s,
        "parquet_mb_per_s": proof.bytes / 1e6 / took.wall_s,
        "parquet_mb_per_cpu_s": proof.bytes / 1e6 / took.cpu_s,
    }


def find(config: Config, broker: Broker, records: int) -> dict[str, float]:
    """Write small records, one by one, and look for some of them."""
    client, name = config.kafka.client(), SETTLED.name(config.run.name)
    sample = Settled("p0.0", 8, "batched", "", 9, 1, 3, 1_700_000_000_400)
    with BoundedProducer(client) as producer:
        for number in range(records):
            value, headers = encode(replace(sample, trajectory_id=f"p{number}.0", tokens=number % 1000))
            producer.send(name, value, headers=headers, partition=0)
    condition = parse_where("tokens = 7 and outcome = 'batched'", row_schema(SETTLED))
    reduce_gc_frequency()
    before = psutil.Process().memory_info().rss
    with measured(broker) as took:
        chunks = read_chunks(client, SETTLED, name, partition_ranges(client, name))
        found = sum(len(condition.rows(chunk.table())) for chunk in chunks)
    assert found == sum(number % 1000 == 7 for number in range(records))
    return rates(records, took, before)


def tail(config: Config, broker: Broker, records: int) -> dict[str, float]:
    """Print the same records as JSON, to nowhere."""
    client, name = config.kafka.client(), SETTLED.name(config.run.name)
    before = psutil.Process().memory_info().rss
    with measured(broker) as took, Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        chunks = read_chunks(client, SETTLED, name, partition_ranges(client, name))
        show(RowOutput((list(as_items(chunk, name)) for chunk in chunks), TAIL_COLUMNS, "jsonl"))
    return rates(records, took, before)


def rates(records: int, took: Took, before: int) -> dict[str, float]:
    """What was measured; `before` is the memory of this process at the start, in bytes."""
    return {
        "records": records,
        "records_per_s": records / took.wall_s,
        "records_per_cpu_s": records / took.cpu_s,
        "grown_mb": (psutil.Process().memory_info().rss - before) / 1e6,
    }


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=8000)
    parser.add_argument("--tokens", type=int, default=4096, help="prompt and response of each together")
    parser.add_argument("--records", type=int, default=200_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, start_broker(BrokerConfig(Path(folder) / "kafka")) as broker:
        config = replace(
            parse_config({}, "the benchmark"), run=RunConfig("export"), kafka=KafkaConfig(broker.bootstrap_servers)
        )
        make_topics(config)
        told = {}
        if given.trajectories:
            told["export"] = export(config, broker, Path(folder) / "dataset", given.trajectories, given.tokens)
        if given.records:
            told["find"] = find(config, broker, given.records)
            told["tail"] = tail(config, broker, given.records)
        print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
