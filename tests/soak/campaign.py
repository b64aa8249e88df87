"""Soak campaign of runs: every process is killed repeatedly, and runs are stopped at random moments.

    make soak ARGS="--seeds 5 --kills 20"

A cell is one scenario with one seed. Its result is saved to `results.json` in the folder as soon as it ends; run again,
the campaign continues with missing and failed cells. Exit code 1 if any cell failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), *(str(REPOSITORY / folder) for folder in ("tests", "tests/end_to_end"))]

from kills import ALL, kill, rounds  # noqa: E402
from laminar_runs import CommandServer, LaminarRun, kill_processes_in  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from small_runs import SMALL, make_model, write_config  # noqa: E402
from stops import GONE_WITHIN_S, stop_at_random_time, stop_cleanly  # noqa: E402

from infra.files import write_atomically  # noqa: E402
from infra.kafka.broker import BrokerConfig, start_broker  # noqa: E402
from infra.kafka.properties import ClientProperties  # noqa: E402
from pipelines.inspect.audit.audit_run import audit  # noqa: E402

Found = dict[str, Any]
Scenario = Callable[[Callable[..., LaminarRun], int], Found]
BETWEEN = ("score", "experience", "trainer")
"""The roles between a finished trajectory and a weight version."""
BETWEEN_KILLS = 50
TO_THE_GOAL, RESUMES = 40, 6
"""Steps of a resumed run, and its maximum number of resumes."""
ENDLESS = ("trainer.optimizer_steps=1000000", "trainer.checkpoint_every=5")


def audit_of(run: LaminarRun) -> Found:
    """The audit's counts of a run that has ended in any way. Raises AssertionError if the audit failed."""
    with start_broker(BrokerConfig(run.folder / "kafka")) as broker:
        found = audit(ClientProperties.at(broker.bootstrap_servers), run.name, ended=True)
    assert found.passed, found.to_json()
    numbers = found.numbers()
    return {name: numbers[name] for name in ("dispatched", "trained", "failed", "lost", "trained_twice")}


def processes_killed(start: Callable[..., LaminarRun], seed: int, *, kills: int) -> Found:
    """Kill each process, broker and zygote included, `kills` times, in random order and at random moments."""
    rng = random.Random(seed)
    return killed(start, itertools.islice(rounds(seed), kills * len(ALL)), lambda: rng.expovariate(1.0))


def between_killed(start: Callable[..., LaminarRun], seed: int) -> Found:
    """Kill score, experience and trainer 50 times in one run, at random moments."""
    rng = random.Random(seed)
    # Slow enough for the supervisor's limit of restarts: see pipelines/run/restarts.py.
    return killed(start, itertools.islice(rounds(seed, BETWEEN), BETWEEN_KILLS), lambda: rng.uniform(3.5, 5.5))


def killed(start: Callable[..., LaminarRun], names: Iterable[str], pause_s: Callable[[], float]) -> Found:
    """Kill each of `names` after a pause in a training run; stop it. Returns its audit and the kills of each role."""
    run = start(*ENDLESS)
    run.until_phase("training", 300)
    kills: Counter[str] = Counter()
    for name in names:
        time.sleep(pause_s())
        kill(run, name)
        kills[name] += 1
    stop_cleanly(run, signal.SIGINT)
    each = ", ".join(f"{name} {count}" for name, count in sorted(kills.items()))
    return {"kills": kills.total(), "of": each, **audit_of(run)}


def run_killed(start: Callable[..., LaminarRun], seed: int) -> Found:
    """Kill `laminar run` itself at a random moment."""
    run = start(*ENDLESS)
    run.until(run.state, 60, "its state")
    time.sleep(random.Random(seed).uniform(0, 20))
    phase = run.state()["phase"]
    run.signal(signal.SIGKILL)
    return {"phase": phase, "gone_after_s": round(run.seconds_until_gone(GONE_WITHIN_S), 1)}


def all_killed(start: Callable[..., LaminarRun], seed: int) -> Found:
    """Kill all processes at random moments, with `laminar runs resume` after each, until the run reaches its goal."""
    rng = random.Random(seed)
    run = start(f"trainer.optimizer_steps={TO_THE_GOAL}", "prompts.heldout=200")
    run.until((run.folder / "config.toml").exists, 90, "its configuration")
    phases: Counter[str] = Counter()
    while phases.total() < RESUMES:
        time.sleep(rng.uniform(0, 25))
        if run.exit_code() is not None:
            break
        phases[run.state()["phase"]] += 1
        run.clean_up()
        run.wait()
        run.resume()
    assert run.wait(300) == 0, run.output()
    run.seconds_until_gone(GONE_WITHIN_S)
    counts = run.audit()
    assert counts["trained"] == TO_THE_GOAL * SMALL["experience"]["global_batch"], counts
    each = ", ".join(f"{phase} {count}" for phase, count in phases.items())
    return {
        "kills": phases.total(),
        "phases": each,
        **{name: counts[name] for name in ("trained", "lost", "trained_twice")},
    }


def run_stopped(start: Callable[..., LaminarRun], seed: int) -> Found:
    """Stop a run by Ctrl-C at a random moment."""
    return {"phase": stop_at_random_time(start(), seed, within_s=20.0)}


def main() -> None:
    """Run the missing cells, print the table."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--folder", type=Path, required=True, help="the folder of runs and results.json")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--kills", type=int, default=20, help="kills of each process in a run")
    arguments.add_argument("--only", metavar="WORD", default="", help="only scenarios whose names contain this")
    options = arguments.parse_args()
    scenarios: dict[str, Scenario] = {
        f"{options.kills} kills a process": partial(processes_killed, kills=options.kills),
        f"{BETWEEN_KILLS} kills of {', '.join(BETWEEN)}": between_killed,
        "laminar run killed": run_killed,
        "all killed and resumed": all_killed,
        "Ctrl-C": run_stopped,
    }
    scenarios = {name: scenario for name, scenario in scenarios.items() if options.only in name}
    results = campaign(options.folder.absolute(), scenarios, options.seeds)
    show(results)
    sys.exit(any("error" in found for found in results.values()))


def campaign(folder: Path, scenarios: dict[str, Scenario], seeds: int) -> dict[str, Found]:
    """The result of each cell, by "scenario/seed"; cells that passed before are not run again."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.json"
    results: dict[str, Found] = json.loads(file.read_text()) if file.exists() else {}
    cells = [(name, seed) for seed in range(seeds) for name in scenarios]
    missing = [(name, seed) for name, seed in cells if "error" in results.get(f"{name}/{seed}", {"error": "not run"})]
    if not missing:
        return results
    shutil.rmtree(folder / "model", ignore_errors=True)
    model = make_model(folder / "model")
    config = write_config(folder / "small.toml", model)
    (temporary := folder / "temporary").mkdir(exist_ok=True)
    command_server = CommandServer(model, temporary)
    try:
        for name, seed in missing:
            results[f"{name}/{seed}"] = _cell(command_server, config, folder / "here", scenarios[name], seed)
            write_atomically(file, json.dumps(results, indent=1))
            print(f"{name}, seed {seed}: {results[f'{name}/{seed}']}", flush=True)
    finally:
        command_server.close()
    return results


def _cell(command_server: CommandServer, config: Path, here: Path, scenario: Scenario, seed: int) -> Found:
    started = time.monotonic()
    shutil.rmtree(here, ignore_errors=True)

    def start(*changes: str) -> LaminarRun:
        return LaminarRun(command_server, here, config, f"soak-{seed}", f"run.seed={seed}", *changes)

    try:
        found = scenario(start, seed)
    except AssertionError as error:
        found = {"error": str(error)[:2000]}
        shutil.copytree(here, here.with_name(f"failed-{scenario_name(scenario)}-{seed}"), dirs_exist_ok=True)
    finally:
        kill_processes_in([here])
    return {**found, "seconds": round(time.monotonic() - started)}


def scenario_name(scenario: Any) -> str:
    """The name of the scenario's function."""
    return str(getattr(scenario, "func", scenario).__name__)


def show(results: dict[str, Found]) -> None:
    """Print one row per cell."""
    table = Table("scenario", "seed", "result", "found", title="Soak campaign")
    for cell, found in sorted(results.items()):
        name, _, seed = cell.rpartition("/")
        details = ", ".join(f"{key} {str(value).strip().splitlines()[-1]}" for key, value in found.items())
        table.add_row(name, seed, "FAILED" if "error" in found else "ok", details)
    Console().print(table)


if __name__ == "__main__":
    main()
