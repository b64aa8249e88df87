"""Does reinforcement learning reach what supervised learning and rejection sampling do not, at equal CPU time?

    OMP_NUM_THREADS=1 python -m benchmarks.evidence
    OMP_NUM_THREADS=1 python -m benchmarks.evidence --set trainer.optimizer_steps=200 --seeds 0

For each seed one warm start, then the arms of benchmarks/evidence_arms.py in a plain loop, without Kafka: reinforcement
learning, a control with shuffled rewards, a longer warm start, and rejection-sampling fine-tuning in one round and in
many. The arms after the control have the CPU seconds that reinforcement learning took. Each result is saved as soon as
it is measured; run again, the command measures only what is missing. `--known` only prints saved results.

Exit code 1 unless, for every seed, the greedy accuracy after reinforcement learning exceeds the warm start's pass@64,
the longer warm start and one round of rejection sampling, and the control rises by at most five points. Iterated
rejection sampling is shown and not judged.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from rich.console import Console
from rich.table import Table

from benchmarks.evidence_arms import ROUNDS, reinforcement_arm, rejection_arm, supervised_arm, warm_start_arm
from benchmarks.recipe import Loop, make_start
from benchmarks.results import Result, Results, add_results
from pipelines.config import Config, load_config
from pipelines.present.report.machine import describe_machine

ARMS: Mapping[str, str] = {
    "warm start": "the model before",
    "reinforcement": "reinforcement learning",
    "rejection": "rejection sampling, one round",
    "iterated": f"rejection sampling, {ROUNDS} rounds, same curriculum",
    "supervised": "longer warm start",
    "shuffled": "control: the same with shuffled rewards",
}
"""Arms by key, in the order in which they are measured: later ones use the result of `reinforcement`."""
MAY_RISE = 0.05


def main() -> None:
    """Measure the missing arms and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--config", type=Path, default=Path("examples/spell_backward.toml"))
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--questions", type=int, default=256, help="held-out questions for pass@k")
    arguments.add_argument("--samples", type=int, default=64, help="answers to each of them")
    arguments.add_argument("--folder", type=Path, default=Path("runs"), help="folder of warm starts")
    add_results(arguments, "runs/evidence.json")
    arguments.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    done = Results(options.results)
    for seed in [] if options.known else options.seeds:
        measure_seed(seed, options, done)
    found = {seed: each for seed in options.seeds if (each := results_of(seed, options, done))}
    failures = [failure for seed in options.seeds for failure in failed(seed, found.get(seed, {}))]
    if options.json:
        machine = describe_machine()
        print(json.dumps({"machine": machine, "config": str(options.config), "seeds": found, "failed": failures}))
    else:
        show(found, options.config)
        for failure in failures:
            sys.stderr.write(f"{failure}\n")
    sys.exit(bool(failures))


def measure_seed(seed: int, options: argparse.Namespace, done: Results) -> None:
    """Measure the arms of `seed` that have no result."""
    config = config_of(seed, options)
    keys = {arm: key_of(arm, config, options) for arm in ARMS}
    if all(done.get(key) for key in keys.values()):
        return
    start = make_start(config, options.folder / "warm-starts")

    def reinforced() -> Result:
        found = done.get(keys["reinforcement"])
        assert found is not None, "arms are measured in order"
        return found

    measures: dict[str, Callable[[Loop], Result]] = {
        "warm start": lambda loop: warm_start_arm(loop, options.questions, options.samples),
        "reinforcement": reinforcement_arm,
        "shuffled": lambda loop: reinforcement_arm(loop, reinforced()["levels"]),
        "supervised": lambda loop: supervised_arm(loop, reinforced()["cpu"]),
        "rejection": lambda loop: rejection_arm(loop, reinforced()["cpu"], 1),
        "iterated": lambda loop: rejection_arm(loop, reinforced()["cpu"], ROUNDS),
    }
    for arm in ARMS:
        with tempfile.TemporaryDirectory() as scratch:
            done.add(keys[arm], partial(_measure, measures[arm], config, start.folder, Path(scratch)))


def _measure(measure: Callable[[Loop], Result], config: Config, model: Path, scratch: Path) -> Result:
    return measure(Loop(config, model, scratch))


def config_of(seed: int, options: argparse.Namespace) -> Config:
    """The configuration of `seed`."""
    return load_config(options.config, [f"run.seed={seed}", f"warm_start.model.seed={seed}", *options.set])


def key_of(arm: str, config: Config, options: argparse.Namespace) -> str:
    """The key of a result: everything that it depends on but the pace of the machine."""
    sections = repr((config.warm_start, config.prompts, config.score, config.experience, config.trainer))
    parts = [f"{arm}, seed {config.run.seed}", blake3(sections.encode()).hexdigest()[:12]]
    return " ".join([*parts, f"{options.questions} x {options.samples}"] if arm == "warm start" else parts)


def results_of(seed: int, options: argparse.Namespace, done: Results) -> dict[str, Result]:
    """The results of `seed` by arm, as far as they are measured."""
    config = config_of(seed, options)
    return {arm: found for arm in ARMS if (found := done.get(key_of(arm, config, options)))}


def failed(seed: int, results: Mapping[str, Result]) -> list[str]:
    """What the results of a seed do not show, one sentence each."""
    if missing := [ARMS[arm] for arm in ARMS if arm not in results]:
        return [f"seed {seed}: not measured: {', '.join(missing)}"]
    before, after = results["warm start"], results["reinforcement"]
    rivals = {f"the warm start's pass@{k}": rate for k, rate in before["pass"].items()}
    rivals |= {ARMS[arm]: results[arm]["greedy"] for arm in ("supervised", "rejection")}
    reached = after["greedy"]
    found = [
        f"seed {seed}: {name} is {rate:.3f}, and greedy accuracy after reinforcement learning {reached:.3f}"
        for name, rate in rivals.items()
        if rate >= reached
    ]
    control = results["shuffled"]
    if control["greedy"] > before["greedy"] + MAY_RISE:
        found.append(f"seed {seed}: the control rose from {before['greedy']:.3f} to {control['greedy']:.3f}")
    return found


def show(found: Mapping[int, Mapping[str, Result]], config: Path) -> None:
    """Print the table."""
    machine = describe_machine()
    title = f"{config}, held-out accuracy by seed ({', '.join(map(str, found))}); {machine['cpu']}, one thread"
    table = Table("arm", title=title, title_justify="left")
    for column in ("greedy", "sampled", "pass@1", "pass@8", "pass@64", "last level", "CPU s, median"):
        table.add_column(column, justify="right")
    for arm, name in ARMS.items():
        results = [each[arm] for each in found.values() if arm in each]
        if results:
            table.add_row(name, *row_of(results))
    Console(width=150).print(table)


def row_of(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cells of an arm: one figure a seed, and the median of the CPU seconds."""
    columns = [[each["greedy"] for each in results], [each["sampled"] for each in results]]
    columns += [[each["pass"][k] for each in results if k in each.get("pass", ())] for k in ("1", "8", "64")]
    levels = [str(each["levels"][-1]) for each in results if each.get("levels")]
    cells = [" ".join(f"{value:.3f}" for value in column) for column in columns]
    return [*cells, " ".join(levels), f"{statistics.median(each['cpu'] for each in results):.0f}"]


if __name__ == "__main__":
    main()
