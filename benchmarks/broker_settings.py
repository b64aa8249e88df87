"""What settings of a local broker change: CPU time and seconds of a transaction that is read back, by setting.

    python -m benchmarks.broker_settings [--rounds 3] [--cycles 300] [--only NAME ...] [--json]

A cycle writes one record of 8 kB with a commit note, and reads it as a role does. Every setting has a broker of its own
in every round, one after the other, so that other work on the machine affects all alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil

from benchmarks.processes import OthersWatch
from benchmarks.tables import print_rows
from infra.kafka import broker
from infra.kafka.admin import admin_client
from infra.kafka.properties import ClientProperties
from infra.kafka.session import Outgoing, Partition, Session
from infra.kafka.session_config import Input, SessionConfig
from pipelines.present.report.machine import describe_machine

OUTPUT, RESTORE = "output", "restore"
WAIT_S = 10.0


@dataclass(frozen=True)
class Setting:
    """A broker with other `overrides` of its server.properties, heap or JVM flags, or other properties of clients."""

    overrides: Mapping[str, str] = field(default_factory=dict)
    heap_mb: int = broker.BrokerConfig.heap_mb
    jvm: tuple[str, ...] = broker.JVM_FLAGS
    clients: Mapping[str, str] = field(default_factory=dict)


SETTINGS = {
    "as it is": Setting(),
    "heap of 128 MB": Setting(heap_mb=128),
    "heap of 1 GB": Setting(heap_mb=1024),
    "second compiler": Setting(jvm=tuple(flag for flag in broker.JVM_FLAGS if "TieredStopAtLevel" not in flag)),
    "segments of 16 MB": Setting({"log.segment.bytes": str(16 << 20)}),
    "a flush each record": Setting({"log.flush.interval.messages": "1"}),
    "lz4": Setting(clients={"compression.type": "lz4"}),
    "zstd": Setting(clients={"compression.type": "zstd"}),
    "one thread each": Setting({"num.network.threads": "1", "num.io.threads": "1"}),
}


@dataclass(frozen=True)
class Cost:
    """Of a cycle: CPU milliseconds of this process and of the broker, elapsed milliseconds, bytes of the log."""

    client: float
    broker: float
    elapsed: float
    log_bytes: float


def main() -> None:
    """Measure and print medians of the rounds."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--cycles", type=int, default=300, help="of which a third more come first, to warm up")
    arguments.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    others, costs = OthersWatch(), dict[str, list[Cost]]()
    for _ in range(options.rounds):
        for name in options.only:
            costs.setdefault(name, []).append(measure(SETTINGS[name], options.cycles))
    rows = [{"setting": name, **median_row(of_rounds)} for name, of_rounds in costs.items()]
    print_rows(rows, f"{describe_machine()['cpu']}, a cycle; {options.rounds} rounds", options.json)
    print(f"other work: {others.share():.0%} of the CPU time", file=sys.stderr)


def median_row(costs: list[Cost]) -> dict[str, float]:
    """The medians of the rounds, and the range of the CPU time."""
    cpu = [each.client + each.broker for each in costs]
    return {
        "client, CPU ms": statistics.median(each.client for each in costs),
        "broker, CPU ms": statistics.median(each.broker for each in costs),
        "both": statistics.median(cpu),
        "least": min(cpu),
        "most": max(cpu),
        "elapsed, ms": statistics.median(each.elapsed for each in costs),
        "log, bytes": statistics.median(each.log_bytes for each in costs),
    }


def measure(setting: Setting, cycles: int) -> Cost:
    """The cost of a cycle with `setting`."""
    with tempfile.TemporaryDirectory() as folder, patch.object(broker, "JVM_FLAGS", setting.jvm):
        data = Path(folder) / "kafka"
        config = broker.BrokerConfig(data, heap_mb=setting.heap_mb, overrides=setting.overrides)
        with broker.start_broker(config) as started:
            with admin_client(started.client()) as admin:
                for name in (OUTPUT, RESTORE):
                    admin.create_topics({name: {"num_partitions": 1, "replication_factor": 1}})
            client = ClientProperties({**started.client().entries, **setting.clients})
            session = Session(SessionConfig(client, "benchmark", (Input(OUTPUT, (0,)),), Partition(RESTORE, 0)))
            try:
                repeat(session, cycles // 3)
                java, before = psutil.Process(started.pid), log_bytes(data)
                used, own, begin = cpu_seconds(java), time.process_time(), time.perf_counter()
                repeat(session, cycles)
                own, elapsed = time.process_time() - own, time.perf_counter() - begin
                used = cpu_seconds(java) - used
                written = log_bytes(data) - before
            finally:
                session.close()
    return Cost(1000 * own / cycles, 1000 * used / cycles, 1000 * elapsed / cycles, written / cycles)


def repeat(session: Session, cycles: int) -> None:
    """Write and read so many records. Raises RuntimeError if one does not arrive."""
    payloads = np.random.default_rng(0)
    for _ in range(cycles):
        tokens = payloads.integers(0, 1000, 2000, np.int32).tobytes()  # compressible as tokens are
        session.commit([Outgoing(OUTPUT, 0, b"key", tokens, ())], {}, {}, {"state": "x" * 500})
        deadline = time.monotonic() + WAIT_S
        while not session.poll(WAIT_S):
            if time.monotonic() > deadline:
                raise RuntimeError(f"a record was not read within {WAIT_S:g} s")


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def log_bytes(folder: Path) -> int:
    """The bytes of the broker's segments."""
    return sum(file.stat().st_size for file in folder.rglob("*.log"))


if __name__ == "__main__":
    main()
