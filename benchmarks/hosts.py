"""Throughput of emulated replicas on several hosts, whose network is slow and loses packets, beside that on one host.

    PYTHONPATH=tests python -m benchmarks.hosts [--replicas 64] [--hosts 8] [--delay-ms 5] [--loss 0.01] [--rounds 2]

Needs root. Hosts are network namespaces. Kafka and the other roles are on one of them, the rollout processes either
there, too, or each on a host of its own; the number of processes is the same. The two take turns in `--rounds`, each
first in every second round, and their medians are compared. The switch between the hosts is a thread of this process:
each run prints its share of a core, which a host's own network would not take. Fails if a run's audit fails, or if the
hosts together have less than 95 % of the throughput of one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import TypeVar

import psutil
from faults.cluster import Cluster
from faults.network import Network, within

from benchmarks.emulated_runs import LIMIT_S, WARM_UP, RunFailed
from benchmarks.ended_runs import rows_of
from benchmarks.many_replicas import BATCH, EXAMPLE, changes
from infra.processes import is_running, spawn
from infra.store.names import default_root
from infra.store.ownership import remove_store
from pipelines.config import load_config
from pipelines.distribution import LAMINAR
from pipelines.inspect.audit.audit_run import audit
from pipelines.present.report.series import batches
from pipelines.run.topics import make_topics
from schemas.records import Metric
from schemas.topics import METRICS

MAIN = "main"
"""The host of Kafka and of all roles but rollout."""
TARGET = 0.95
STOP_S = 90.0
T = TypeVar("T")


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--replicas", type=int, default=64)
    arguments.add_argument("--hosts", type=int, default=8)
    arguments.add_argument("--delay-ms", type=float, default=5.0, help="of each packet")
    arguments.add_argument("--loss", type=float, default=0.01, help="share of the packets")
    arguments.add_argument("--batch", type=int, default=BATCH, help="trajectories per replica and step")
    arguments.add_argument("--time-scale", type=float, default=1.0)
    arguments.add_argument("--steps", type=int, default=6)
    arguments.add_argument("--rounds", type=int, default=2, help="two runs each")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="laminar-hosts-") as folder:
        one, several = compare(options.rounds, lambda spread, number: run(options, Path(folder), spread, number))
    share = several / one
    print(f"medians of {options.rounds} rounds: {one:,.0f} tokens/s on one host, {several:,.0f} on {options.hosts}")
    print(f"{options.hosts} hosts have {100 * share:.1f} % of the throughput of one; needed: {100 * TARGET:g} %")
    sys.exit(share < TARGET)


def compare(rounds: int, measure: Callable[[bool, int], float]) -> tuple[float, float]:
    """The medians of `measure` on one host (False) and on several (True), which take turns; it gets the round's number
    too."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for spread in (False, True) if number % 2 == 0 else (True, False):
            found[spread].append(measure(spread, number))
    return statistics.median(found[False]), statistics.median(found[True])


def run(options: argparse.Namespace, folder: Path, spread: bool, number: int = 0) -> float:
    """Trained tokens per emulated second, after the warm-up, of a run with its rollout processes on `options.hosts`
    hosts (`spread`), or on that of Kafka. Prints it, and the CPU time of the switch. `number` is that of the round.

    Raises RunFailed, also if its audit fails, and NoNetwork.
    """
    places = [f"h{number}" if spread else MAIN for number in range(options.hosts)]
    name = f"{'spread' if spread else 'together'}-{number}"
    with _network((MAIN, *dict.fromkeys(places)), options) as network:
        cluster = Cluster(network, (MAIN,), folder / f"kafka-{name}")

        def here(work: Callable[[], T]) -> T:
            return within(network.hosts[MAIN], work)

        try:
            cluster.start()
            sets = [
                *changes(options.replicas, options),
                f"run.name={name}",
                f"run.folder={folder}",
                f"kafka.bootstrap_servers={cluster.client.bootstrap_servers}",
                f"rollout.replicas={options.replicas // options.hosts}",
                f"rollout.processes={options.hosts}",
                f"placement.max_replicas={options.replicas}",
                f"experience.global_batch={options.batch * options.replicas}",
            ]
            config = load_config(EXAMPLE, sets)
            here(lambda: make_topics(config))
            began, switch_before = time.monotonic(), network.switch_seconds
            with _processes(network, places, sets, folder / f"logs-{name}") as processes:
                _until_step(options.steps, processes, lambda: here(lambda: _steps(cluster, name)))
            switch = (network.switch_seconds - switch_before) / (time.monotonic() - began)
            found = here(lambda: audit(cluster.client, name))
            steps = batches(here(lambda: rows_of(cluster.client, METRICS.name(name), Metric)))
        finally:
            cluster.stop()
            remove_store(default_root(name), in_use=True)  # its processes were killed
        dropped = sum(rule.dropped for rule in network.rules.values())
        delayed = sum(rule.delayed for rule in network.rules.values())
    if not found.passed:
        raise RunFailed(f"the audit of {name} failed: {found}")
    seconds = (steps[-1].at - steps[WARM_UP - 1].at) / 1000 * config.run.time_scale
    tokens = sum(step.values["tokens"] for step in steps[WARM_UP:]) * config.rollout.emulation.stride
    print(
        f"{name}: {tokens / seconds:,.0f} tokens/s trained in {len(steps) - WARM_UP} steps of {seconds:.0f} s in all, "
        f"{found.trained:,} trajectories, audit passed; packets: {delayed:,} delayed, {dropped:,} lost; "
        f"switch: {switch:.0%} of a core",
        flush=True,
    )
    return tokens / seconds


@contextmanager
def _network(names: Sequence[str], options: argparse.Namespace) -> Iterator[Network]:
    """Hosts of which every two are apart by the delay and the loss of `options`."""
    with Network(names, seed=options.seed, net="198.18.81") as network:
        for pair in permutations(names, 2):
            rule = network.rule(*pair)
            rule.delay_s, rule.loss = options.delay_ms / 1000, options.loss
        yield network


@contextmanager
def _processes(
    network: Network, places: Sequence[str], sets: Sequence[str], logs: Path
) -> Iterator[dict[str, psutil.Process]]:
    """The processes of a run, one rollout process on each of `places`; drained, or killed after an error."""
    logs.mkdir()
    started: dict[str, psutil.Process] = {}
    given = [word for change in sets for word in ("--set", change)]

    def start(host: str, role: str, index: int = 0) -> None:
        command = [*LAMINAR, "submit", role, str(EXAMPLE), *(["--index", str(index)] if index else []), *given]
        log = logs / f"{role}-{index}.log"
        started[str(log)] = spawn(network.command(host, *command), log, die_with_parent=True)

    try:
        for role in ("data-plane", "trainer"):
            start(MAIN, role)
        for index, host in enumerate(places):
            start(host, "rollout", index)
        yield started
        for process in started.values():
            process.terminate()
        for log, process in started.items():
            if code := process.wait(STOP_S):
                raise RunFailed(f"a process has exited with {code}: {_end_of(log)}")
    finally:
        for process in started.values():
            if is_running(process):
                process.kill()


def _until_step(steps: int, processes: dict[str, psutil.Process], step: Callable[[], int]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while step() < steps:
        for log, process in processes.items():
            if not is_running(process):
                raise RunFailed(f"a process has ended: {_end_of(log)}")
        if time.monotonic() > deadline:
            raise RunFailed(f"step {steps} was not reached in {LIMIT_S:g} s")
        time.sleep(1.0)


def _steps(cluster: Cluster, run: str) -> int:
    """The optimizer steps so far."""
    return max(
        (row.step for row in rows_of(cluster.client, METRICS.name(run), Metric) if row.name == "trainer"), default=0
    )


def _end_of(log: str) -> str:
    return f"{log}:\n{Path(log).read_text()[-2000:]}"


if __name__ == "__main__":
    main()
