"""Kafka requests a global batch, by kind, and transactions by role, counted by a proxy between a run and its broker.

    PYTHONPATH=tests python -m benchmarks.kafka_requests [--steps 200]

The figures are of the middle of the run, without the start and the end; bytes in the broker's files are of all of it.
Polls and heartbeats follow the clock, so requests a batch of two runs compare only at about the same seconds a batch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from faults.kafka_frames import Api, Request
from faults.kafka_proxy import Connection
from faults.proxied_broker import proxied_broker

from benchmarks.sides import Work, warm_start
from pipelines.config import load_config
from pipelines.inspect.metrics_file import read_metrics
from pipelines.present.report.machine import describe_machine
from pipelines.present.report.series import batches

EXAMPLE, FOLDER = Path("examples/chain_sum.toml"), Path("build/kafka_requests")
WARM_UP = 20
"""Optimizer steps before the first count; as many at the end are left out."""
LIMIT_S = 900.0
TRANSACTIONS = "transactions of "


class RequestCounter:
    """Counts the requests that pass the proxy, and transactions by role. Written by the proxy's thread alone."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    async def on_request(self, connection: Connection, request: Request) -> bool:
        """Count `request`, which passes."""
        self.counts[request.kind] += 1
        if request.api == Api.END_TXN and request.transactional_id is not None:
            self.counts[TRANSACTIONS + request.transactional_id.split(".")[-2]] += 1
        return True

    async def on_response(self, connection: Connection, request: Request, response: bytes) -> bool:
        """All responses pass."""
        return True


def main() -> None:
    """Run the example, and print the counts."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--steps", type=int, default=200, help="optimizer steps of the run")
    steps = arguments.parse_args().steps
    for name in ("requests", "broker"):  # the warm start is kept
        shutil.rmtree(FOLDER / "runs" / name, ignore_errors=True)
    changes = ["run.name=requests", f'run.folder="{FOLDER.absolute() / "runs"}"', f"trainer.optimizer_steps={steps}"]
    config = load_config(EXAMPLE, changes)
    model = warm_start(Work(FOLDER, "requests", config))
    changes += [f'model.path="{model}"', "prompts.heldout=0", "kafka.replication_factor=1"]
    with proxied_broker(FOLDER.absolute() / "runs/broker") as kafka:
        counter = kafka.proxy.add(RequestCounter())

        changes.append(f'kafka.bootstrap_servers="127.0.0.1:{kafka.proxy.port}"')
        command = [Path(sys.executable).with_name("laminar"), "run", EXAMPLE, "--json"]
        with (FOLDER / "log").open("w") as log:
            run = subprocess.Popen([*command, *(f"--set={each}" for each in changes)], stdout=log, stderr=log)
            first, began, before = _after(WARM_UP, counter, run)
            last, ended, after = _after(steps - WARM_UP, counter, run)
            if run.wait(LIMIT_S):
                raise SystemExit(f"laminar run exited with {run.returncode}: see {FOLDER / 'log'}")
    found = figures(after - before, last - first, ended - began)
    found["bytes_a_trajectory"] = bytes_by_topic(FOLDER / "runs/broker/log", steps * config.experience.global_batch)
    print(json.dumps(found | {"machine": describe_machine()}, indent=1))


def figures(counts: Counter[str], batches: int, seconds: float) -> dict[str, Any]:
    """The figures of `counts` of a RequestCounter over `batches` in `seconds`: by batch, and all of them by second."""
    a_batch = {kind: round(count / batches, 2) for kind, count in counts.most_common()}
    requests = {kind: count for kind, count in a_batch.items() if not kind.startswith(TRANSACTIONS)}
    by_role = {kind.removeprefix(TRANSACTIONS): count for kind, count in a_batch.items() if kind not in requests}
    all_requests = sum(counts[kind] for kind in requests)
    return {
        "batches": batches,
        "seconds_a_batch": round(seconds / batches, 3),
        "requests_a_batch": requests,
        "all": round(all_requests / batches, 1),
        "requests_a_second": round(all_requests / seconds, 1),
        "transactions_a_batch": by_role,
        "transactions_a_second": round((counts.total() - all_requests) / seconds, 2),
    }


def bytes_by_topic(log: Path, trajectories: int) -> dict[str, float]:
    """Bytes of the files in a broker's folder `log`, indexes not included, for each of `trajectories`; most first."""
    sizes: Counter[str] = Counter()
    for file in log.glob("*/*.log"):
        sizes[file.parent.name.rpartition("-")[0].rpartition(".")[2]] += file.stat().st_size
    return {topic: round(size / trajectories, 1) for topic, size in sizes.most_common() if size}


def _after(step: int, counter: RequestCounter, run: subprocess.Popen[bytes]) -> tuple[int, float, Counter[str]]:
    """The first step that was trained at or after `step`, with the time (s) and the counts then.

    Raises SystemExit if the run ends.
    """
    file = FOLDER / "runs/requests/metrics.jsonl"
    while run.poll() is None:
        trained = batches(read_metrics(file)) if file.exists() else []
        if trained and trained[-1].step >= step:
            return trained[-1].step, time.monotonic(), counter.counts.copy()
        time.sleep(0.5)
    raise SystemExit(f"the run ended before step {step}: see {FOLDER / 'log'}")


if __name__ == "__main__":
    main()
