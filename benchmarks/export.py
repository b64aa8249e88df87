"""MB/s from a topic to Parquet, and records/s of `laminar topics find` and `tail`.

    python -m benchmarks.export --trajectories 8000 --tokens 4096 --records 200000

It uses a real broker and the real pipeline on the embedded runner. `export` lasts from the session's start to the last
finished file; it reports Parquet bytes, log bytes, and CPU time of this process and of the broker, which other work on
the machine affects less than wall-clock time. `find` reads small records, one per Kafka record, and decodes and filters
them all; `tail` prints them all as JSON.
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
from infra.conditions.tables import table_condition
from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.kafka.producer import BoundedProducer
from infra.kafka.ranges import partition_ranges
from infra.runners.garbage_collection import reduce_gc_frequency
from infra.runners.run import run_pipeline
from operators.export.columns import row_schema
from operators.export.config import Contents, ExportConfig
from operators.export.folder import ExportFolder
from operators.export.verify import check_manifests, verify
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
class Cost:
    """Seconds of wall-clock time, of this process's CPU time, and of the broker's."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    broker_cpu_s: float = 0.0


@contextmanager
def measured(broker: Broker) -> Iterator[Cost]:
    """Measure the block; the result is complete when the block ends."""
    broker_process, cost = psutil.Process(broker.pid), Cost()
    before, ours = broker_process.cpu_times(), time.process_time()
    began = time.monotonic()
    yield cost
    after = broker_process.cpu_times()
    cost.wall_s, cost.cpu_s = time.monotonic() - began, time.process_time() - ours
    cost.broker_cpu_s = after.user + after.system - before.user - before.system


def export(config: Config, broker: Broker, folder: Path, trajectories: int, tokens: int) -> dict[str, float]:
    """Publish experiences, export them, and verify the export."""
    client, run, experiences = config.kafka.client(), config.run.name, Experiences(tokens)
    with BoundedProducer(client) as producer:
        while experiences.count < trajectories:
            for value, headers in encode_block(experiences.next()):
                producer.send(EXPERIENCES.name(run), value, key=b"p", headers=headers, partition=0)
    contents = Contents(
        run, EXPERIENCES.short_name, starts=dict.fromkeys(partition_ranges(client, EXPERIENCES.name(run)), 0)
    )
    ExportFolder(folder, contents).close()
    with measured(broker) as cost:
        export_config = ExportConfig(folder, contents)
        run_pipeline(
            partial(build, config=export_config, client=client, transaction_timeout_s=60.0),
            "embedded",
            (),
            close_shards,
        )
    proof = check_manifests(folder)
    log = sum(segment.stat().st_size for segment in (folder.parent / "kafka").rglob(f"{EXPERIENCES.name(run)}-*/*.log"))
    assert not verify(folder).problems
    return {
        "rows": proof.rows,
        "parquet_mb": proof.bytes / 1e6,
        "log_mb": log / 1e6,
        "wall_s": cost.wall_s,
        "cpu_s": cost.cpu_s,
        "broker_cpu_s": cost.broker_cpu_s,
        "parquet_mb_per_s": proof.bytes / 1e6 / cost.wall_s,
        "parquet_mb_per_cpu_s": proof.bytes / 1e6 / cost.cpu_s,
    }


def find(config: Config, broker: Broker, records: int) -> dict[str, float]:
    """Publish small records one by one, and find some of them."""
    client, name = config.kafka.client(), SETTLED.name(config.run.name)
    sample = Settled("p0.0", 8, "batched", "", 9, 1, 3, 1_700_000_000_400)
    with BoundedProducer(client) as producer:
        for number in range(records):
            value, headers = encode(replace(sample, trajectory_id=f"p{number}.0", tokens=number % 1000))
            producer.send(name, value, headers=headers, partition=0)
    condition = table_condition("tokens = 7 and outcome = 'batched'", row_schema(SETTLED))
    reduce_gc_frequency()
    before = psutil.Process().memory_info().rss
    with measured(broker) as cost:
        chunks = read_chunks(client, SETTLED, name, partition_ranges(client, name))
        found = sum(len(condition.rows(chunk.table())) for chunk in chunks)
    assert found == sum(number % 1000 == 7 for number in range(records))
    return rates(records, cost, before)


def tail(config: Config, broker: Broker, records: int) -> dict[str, float]:
    """Print the same records as JSON, to /dev/null."""
    client, name = config.kafka.client(), SETTLED.name(config.run.name)
    before = psutil.Process().memory_info().rss
    with measured(broker) as cost, Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        chunks = read_chunks(client, SETTLED, name, partition_ranges(client, name))
        show(RowOutput((list(as_items(chunk, name)) for chunk in chunks), TAIL_COLUMNS, "jsonl"))
    return rates(records, cost, before)


def rates(records: int, cost: Cost, before: int) -> dict[str, float]:
    """The measured rates; `before` is this process's memory at the start, in bytes."""
    return {
        "records": records,
        "records_per_s": records / cost.wall_s,
        "records_per_cpu_s": records / cost.cpu_s,
        "grown_mb": (psutil.Process().memory_info().rss - before) / 1e6,
    }


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=8000)
    parser.add_argument(
        "--tokens", type=int, default=4096, help="tokens of each trajectory, prompt and response together"
    )
    parser.add_argument("--records", type=int, default=200_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, start_broker(BrokerConfig(Path(folder) / "kafka")) as broker:
        config = replace(
            parse_config({}, "the benchmark"), run=RunConfig("export"), kafka=KafkaConfig(broker.bootstrap_servers)
        )
        make_topics(config)
        results = {}
        if options.trajectories:
            results["export"] = export(config, broker, Path(folder) / "dataset", options.trajectories, options.tokens)
        if options.records:
            results["find"] = find(config, broker, options.records)
            results["tail"] = tail(config, broker, options.records)
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
