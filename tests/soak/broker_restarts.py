"""Two runs share a broker that stops or is killed at random moments: both reach their goal, and nothing is lost.

    .venv/bin/python tests/soak/broker_restarts.py --folder build/soak/broker --minutes 60

One line per run. The first failure ends the program with code 1 and leaves the run's folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), *(str(REPOSITORY / folder) for folder in ("tests", "tests/end_to_end"))]

from laminar_runs import CommandServer, LaminarRun  # noqa: E402
from small_runs import make_model, write_config  # noqa: E402

from infra.kafka.broker import Broker, BrokerConfig, start_broker  # noqa: E402

STEPS = 300
PATIENCE_S = 300.0
"""How long a run may take to train a step after a restart of the broker."""
KILLED = 0.2
"""The share of restarts at which the broker is killed; at the others it stops cleanly."""


class RunFailed(RuntimeError):
    """A run does not continue, has lost something, or ended with an error."""


def trained(run: LaminarRun) -> int:
    """The last optimizer step in the run's metrics."""
    try:
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()[-500:]
    except FileNotFoundError:
        return 0
    steps = [each["step"] for each in map(json.loads, lines) if each.get("name") == "trainer"]
    return int(steps[-1]) if steps else 0


def check(run: LaminarRun) -> None:
    """Raise RunFailed if the run's output shows a failure."""
    if "FAILED" in run.output() or run.exit_code() not in (None, 0):
        raise RunFailed(f"{run.name}: exit code {run.exit_code()}\n{run.output()[-3000:]}")


def restart(broker: Broker, draw: random.Random) -> None:
    """Stop or kill the broker, and start it a moment later."""
    broker.kill() if draw.random() < KILLED else broker.stop()
    time.sleep(draw.choice([0.0, 1.0, 3.0]))
    broker.start(lambda line: print(f"  {line}", flush=True) if "hanging" in line else None)


def until_all_train(runs: list[LaminarRun]) -> None:
    """Wait until every run has trained a step, or has ended."""
    steps, deadline = [trained(run) for run in runs], time.monotonic() + PATIENCE_S
    while any(run.exit_code() is None and trained(run) <= step for run, step in zip(runs, steps, strict=True)):
        for run in runs:
            check(run)
        if time.monotonic() > deadline:
            raise RunFailed(f"no step in {PATIENCE_S:g} s: {[(run.name, trained(run)) for run in runs]}")
        time.sleep(0.5)


def try_once(folder: Path, server: CommandServer, config: Path, draw: random.Random) -> None:
    """Run two runs to their goal on a broker that restarts."""
    with start_broker(BrokerConfig(folder / "kafka")) as broker:
        changes = (f"kafka.bootstrap_servers={broker.bootstrap_servers}", f"trainer.optimizer_steps={STEPS}")
        runs = [LaminarRun(server, folder / name, config, f"{folder.name}-{name}", *changes) for name in ("a", "b")]
        restarts = 0
        try:
            for run in runs:
                run.until_phase("training")
            while all(run.exit_code() is None for run in runs):
                time.sleep(draw.uniform(0.5, 6.0))
                restart(broker, draw)
                restarts += 1
                until_all_train(runs)
            for run in runs:
                run.wait(PATIENCE_S)
                check(run)
                audit = run.audit()
                if not audit["passed"]:
                    raise RunFailed(f"{run.name}: {audit}")
                print(f"{run.name}: {restarts} restarts, {audit['trained']} trained, audit passed", flush=True)
        finally:
            for run in runs:
                run.clean_up()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/soak/broker"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (temporary := folder / "temporary").mkdir(exist_ok=True)
    model = make_model(folder / "demo")
    config = write_config(folder / "small.toml", model)
    server = CommandServer(model, temporary)
    draw, end = random.Random(options.seed), time.monotonic() + options.minutes * 60
    number = 0
    try:
        while time.monotonic() < end:
            number += 1
            try_once(folder / f"seed{options.seed}-{os.getpid()}-{number}", server, config, draw)
    except RunFailed as failure:
        print(failure)
        return 1
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
