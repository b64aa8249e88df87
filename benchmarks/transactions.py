"""What a transaction of a shard costs with its commit note, and without.

    python -m benchmarks.transactions [--pairs 300]

Both write one record of 1 kB. They alternate, so that other work on the machine affects both alike. CPU time is that of
blocks of transactions of one kind.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.processes import OthersWatch
from infra.kafka.admin import admin_client
from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.kafka.session import Outgoing, Partition, Session
from infra.kafka.session_config import SessionConfig
from pipelines.present.report.machine import describe_machine

WARM_UP, BLOCK, GAP_S = 200, 100, 0.01
OUTPUT, RESTORE = "output", "restore"


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--pairs", type=int, default=300)
    pairs = arguments.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder, start_broker(BrokerConfig(Path(folder) / "kafka")) as broker:
        with admin_client(broker.client()) as admin:
            admin.create_topics({OUTPUT: {"num_partitions": 1, "replication_factor": 1}})
            admin.create_topics({RESTORE: {"num_partitions": 1, "replication_factor": 1}})
        session = Session(SessionConfig(broker.client(), "benchmark", (), Partition(RESTORE, 0)))
        others = OthersWatch()
        for _ in range(WARM_UP):
            commit(session, noted=True)
        seconds = [(commit(session, noted=True), commit(session, noted=False)) for _ in range(pairs)]
        noted, unnoted = (1000 * np.array(column) for column in zip(*seconds, strict=True))
        found: dict[str, Any] = {
            "pairs": pairs,
            "noted_ms": {f"p{at}": float(np.percentile(noted, at)) for at in (5, 50)},
            "unnoted_ms": {f"p{at}": float(np.percentile(unnoted, at)) for at in (5, 50)},
            "median_of_differences_ms": float(np.median(noted - unnoted)),
            "noted_cpu_ms": cpu_of(session, broker, noted=True),
            "unnoted_cpu_ms": cpu_of(session, broker, noted=False),
            "machine": {**describe_machine(), "busy_for_others": others.share()},
        }
        session.close()
    print(json.dumps(found))


def commit(session: Session, *, noted: bool) -> float:
    """The seconds of one commit."""
    time.sleep(GAP_S)
    begin = time.perf_counter()
    session.commit([Outgoing(OUTPUT, 0, b"key", bytes(1000), ())], {}, {}, {"state": "x" * 500}, False, noted)
    return time.perf_counter() - begin


def cpu_of(session: Session, broker: Broker, *, noted: bool) -> dict[str, float]:
    """The CPU milliseconds of a commit: of this process, and of the broker."""
    java = psutil.Process(broker.pid)
    before, begin = java.cpu_times(), time.process_time()
    for _ in range(BLOCK):
        commit(session, noted=noted)
    own, after = time.process_time() - begin, java.cpu_times()
    used = after.user + after.system - before.user - before.system
    return {"client": 1000 * own / BLOCK, "broker": 1000 * used / BLOCK}


if __name__ == "__main__":
    main()
