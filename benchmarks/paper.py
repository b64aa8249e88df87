"""The evaluation of the Laminar paper, predicted: three models at 16 to 1,024 GPUs under five schedules.

    python -m benchmarks.paper [--models 7B 32B 72B 7B-tool] [--scales small ... large] [--part 8] [--known] [--json]

Real placement and replicas run in virtual time (`pipelines/simulate/prediction`), with emulated engines. Everything is
from the paper (arXiv 2510.12633) or from the hardware, but two numbers that are fitted on the paper's throughputs of
Laminar with 32B at 32 and 512 GPUs: the trainer's speed on 16 GPUs, and how it falls with their number. Everything else
is predicted. Assumed where the paper is silent: splits marked in `SPLITS`, mean lengths of 4.4K tokens, prompts of 512
tokens (at most 2K in the paper), decode steps of 7B and 72B, which are derived from those of 32B. Of tool use (7B-tool)
the paper tells that a response makes at most 8 calls, and that their times have a median above 10 s and a tail above
300 s: here 1 to 8 calls of lognormal duration. `python -m benchmarks.beyond_paper` predicts what goes beyond the paper.

`--part` predicts such a part of the cluster: fewer replicas and an equally smaller batch. Results are saved as soon as
they are known; run again, the command predicts those that are missing or of other code.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.results import SIMULATED_CODE, Result, Results, add_results, code_hash
from pipelines.config import parse_config
from pipelines.simulate.prediction.cluster import Cluster, Overheads
from pipelines.simulate.prediction.world import PredictedWorld

SCHEDULES = ("synchronous", "one_step", "stream", "partial_rollout", "laminar")
GLOBAL_BATCH = 8192
PROMPT, P50, P99, LONGEST = 512, 3000, 18_000, 16_384
FITTED_RATE, FITTED_DECLINE = 1312.0, 0.207
"""Tokens/s of a 32B trainer on each of 16 GPUs, and the exponent by which it falls: 21K tokens/s at 32 GPUs, of which
16 train, and 226K at 512, of which 320 train."""
PAPER_LAMINAR = {("32B", 32): 21_000.0, ("32B", 512): 226_000.0}
PAPER_SPEEDUP = {"synchronous": 2.56, "one_step": 1.98, "stream": 1.93, "partial_rollout": 1.39}
PAPER_MOST = {"synchronous": 5.49, "one_step": 4.09, "stream": 4.06, "partial_rollout": 1.81}
PAPER_TOOL_SPEEDUP = "1.21 to 5.42, mean of all but partial_rollout 2.62"
PAPER_EFFICIENCY = {"32B": 68.2, "all": 53.7, "7B-tool": 46.5}


@dataclass(frozen=True)
class Model:
    """A model on H800. `layers` and `kv_bytes` are those of Qwen2.5. `stall_s` is how long a version stalls the trainer
    with Laminar, `relay_s` the time until the last relay has it. With `tools` its responses call tools."""

    name: str
    parameters: float
    layers: int
    kv_bytes: int
    tensor_parallel: int
    stall_s: float
    relay_s: float
    tools: bool = False


_MATH = {
    "7B": Model("7B", 7.6e9, 28, 57_344, 1, 0.3, 0.3),
    "32B": Model("32B", 32.8e9, 64, 262_144, 4, 0.64, 0.6),
    "72B": Model("72B", 72.7e9, 80, 327_680, 8, 1.4, 1.6),
}
MODELS = {**_MATH, "7B-tool": replace(_MATH["7B"], name="7B-tool", tools=True)}
TOOLS = {"most_calls": 8, "p50_s": 10.0, "p99_s": 300.0}
SCALES = {
    name: {model: gpus * times for model, gpus in (("7B", 16), ("32B", 32), ("72B", 64), ("7B-tool", 16))}
    for name, times in (("small", 1), ("lower", 2), ("middle", 4), ("upper", 8), ("large", 16))
}
_HALF = dict.fromkeys(SCHEDULES, 0.5)
_OF_512 = {"one_step": 3 / 8, "stream": 3 / 8, "partial_rollout": 5 / 8, "laminar": 5 / 8}
SPLITS: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("72B", "middle"): {"one_step": 3 / 8, "stream": 3 / 8, "partial_rollout": 0.5, "laminar": 0.5},
    ("72B", "upper"): _OF_512,
    ("72B", "large"): {"one_step": 1 / 4, "stream": 1 / 4, "partial_rollout": 5 / 8, "laminar": 3 / 4},
    # assumed, but Laminar's at 7B: as for 72B with half as many GPUs, or as many
    ("32B", "large"): _OF_512,
    ("7B", "large"): {"one_step": 1 / 4, "stream": 1 / 4, "partial_rollout": 5 / 8, "laminar": 3 / 4},
    ("7B-tool", "large"): {"one_step": 1 / 4, "stream": 1 / 4, "partial_rollout": 5 / 8, "laminar": 3 / 4},
}
"""Share of the GPUs that train; half of them elsewhere."""


@dataclass(frozen=True)
class Point:
    """One bar: a model on `gpus` under a schedule. `changes` are to the configuration, beyond the paper."""

    model: str
    scale: str
    schedule: str
    train_share: float = 0.0
    """Share of the GPUs that train; 0: that of the paper."""
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def gpus(self) -> int:
        return SCALES[self.scale][self.model]

    @property
    def colocated(self) -> bool:
        return self.schedule == "synchronous"

    @property
    def tensor_parallel(self) -> int:
        of = MODELS[self.model].tensor_parallel
        return 2 if of == 1 and self.schedule in ("synchronous", "one_step", "stream") else of

    def split(self) -> tuple[int, int]:
        """GPUs of the trainer and replicas."""
        share = self.train_share or SPLITS.get((self.model, self.scale), _HALF).get(self.schedule, 0.5)
        train = self.gpus if self.colocated else round(self.gpus * share)
        generate = self.gpus if self.colocated else self.gpus - train
        return train, generate // self.tensor_parallel


def roofline(model: Model, tensor_parallel: int) -> dict[str, Any]:
    """The decode steps of `model`: those of 32B on four GPUs, with the weights, layers and arithmetic of it."""
    measured = ((1, 10.7), (8, 11.5), (16, 13.0), (32, 15.0), (64, 18.5), (128, 26.0), (256, 37.5))
    if model.name == "32B":
        rows = [list(row) for row in measured]
    else:
        per_layer = 0.06 if tensor_parallel == 1 else 0.09  # launches, and the two all-reduces of a layer
        reading = 1e3 * 2 * model.parameters / tensor_parallel / 3.35e12
        arithmetic = (model.parameters / tensor_parallel) / (32.8e9 / 4)
        kv_ms = 1e3 * 4096 * model.kv_bytes / tensor_parallel / 3.35e12
        first = measured[0][1] - 0.0803
        rows = [
            [b, reading + per_layer * model.layers + arithmetic * (ms - 0.0803 * b - first) + kv_ms * b]
            for b, ms in measured
        ]
    return {
        "decode_ms": rows,
        "kv_ns": 1e9 * model.kv_bytes / tensor_parallel / 3.35e12,
        "prefill_us": 1e6 * 2 * model.parameters / (tensor_parallel * 989e12 * 0.5),
        "kv_move_us": 1e6 * model.kv_bytes / 100e9,
    }


def trainer_rate(model: Model, gpus: int) -> float:
    """Tokens/s of a trainer on `gpus` GPUs."""
    return FITTED_RATE * 32.8e9 / model.parameters * gpus * (gpus / 16) ** -FITTED_DECLINE


def cluster_of(point: Point, part: int, seed: int, steps: int) -> Cluster:
    """The cluster of a point, or a part of it that has whole replicas."""
    model = MODELS[point.model]
    train, replicas = point.split()
    while part > 1 and (replicas % part or replicas < 2 * part):
        part //= 2
    tensor_parallel, laminar = point.tensor_parallel, point.schedule == "laminar"
    quota = min(1024, max(64, GLOBAL_BATCH // replicas))
    replicas, batch = replicas // part, GLOBAL_BATCH // part
    rate = trainer_rate(model, train) / part
    capacity = int((72e9 * tensor_parallel - 2 * model.parameters) / model.kv_bytes)
    sync_s = model.relay_s if laminar else 2 * model.relay_s
    table: dict[str, Any] = {
        "run": {"name": "paper", "seed": seed},
        "prompts": {
            "source": "synthetic",
            "prompt_tokens": PROMPT,
            "max_new_tokens": LONGEST,
            "samples_per_prompt": 16,
        },
        "rollout": {
            "engine": "emulated",
            "replicas": replicas,
            "slots": 1024,
            "context": 18_432,
            "kv_capacity": capacity,
            "heartbeat_s": 2.0,
            "progress_s": 1e6,
            "progress_tokens": 1_000_000,
            "linger_s": 0.5,
            "emulation": {
                "pull_s": 0.57,
                "lengths": {"p50": P50, "p99": P99},
                "roofline": roofline(model, tensor_parallel),
                "tools": TOOLS if model.tools else {},
            },
        },
        "placement": {
            "schedule": point.schedule,
            "max_replicas": replicas,
            "repack_requests": 256,
            "replica_batch": quota if laminar else 1024,
        },
        "score": {"answer": "whole", "rewards": [{"name": "length", "options": {"target": 100, "limit": 1500}}]},
        "experience": {"global_batch": batch, "max_staleness": 4},
        "trainer": {
            "optimizer_steps": steps,
            "emulation": {
                "step_s": [[0.0, 1.0], [1e6, 1.0 + 1e6 / rate]],
                "stall_s": model.stall_s,
                "broadcast_s": sync_s,
            },
        },
    }
    for name, value in point.changes:
        section, key = name.split(".")
        table[section][key] = value
    return Cluster(
        parse_config(table, "benchmarks/paper.py"),
        Overheads(batch_s=1.9),
        training_parts=16 if point.schedule == "stream" else 1,
        train_gpus=max(1, train // part),
        gpus_per_replica=tensor_parallel,
        colocated=point.colocated,
    )


def predict(point: Point, part: int, seed: int, steps: int) -> Result:
    """Predict one point."""
    cluster = cluster_of(point, part, seed, steps)
    parts = GLOBAL_BATCH / cluster.config.experience.global_batch
    world = PredictedWorld(cluster)
    began = time.process_time()
    measured = world.run()
    cpu = time.process_time() - began
    found = measured.prediction()
    return {
        **{name: value for name, value in found.to_json().items() if isinstance(value, int | float)},
        "finish_staleness": list(found.finish_staleness),
        "kv_cycle": measured.kv_cycle(),
        "tokens_per_s": found.trained_tokens_per_s * parts,
        "cpu_s": cpu,
        "trajectories_per_cpu_s": found.trajectories / cpu,
        "speed": world.scheduler.now / cpu,
    }


def main() -> None:
    """Predict and print."""
    arguments = prediction_arguments(__doc__, 8, "runs/paper.json")
    arguments.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    arguments.add_argument("--scales", nargs="+", default=list(SCALES), choices=list(SCALES))
    options = arguments.parse_args()
    points = {
        f"{model} {SCALES[scale][model]} {schedule}": Point(model, scale, schedule)
        for scale in options.scales
        for model in options.models
        for schedule in SCHEDULES
    }
    rows = predicted_rows(options, {name: (str(point), partial(predict, point)) for name, point in points.items()})
    if options.json:
        print(json.dumps(rows))
        return
    console = Console(width=120)
    console.print(_table(rows, options))
    for line in (*speed_of(rows), *_summary(rows), *_staleness(rows), *_kv_cycles(rows)):
        console.print(line)


def prediction_arguments(doc: str, part: int, results: str) -> argparse.ArgumentParser:
    """The arguments of a command that predicts clusters, by default such a part of each, with the text `doc`."""
    arguments = argparse.ArgumentParser(description=doc.partition("\n")[0])
    arguments.add_argument("--part", type=int, default=part, choices=(1, 2, 4, 8, 16), help="predict this part of it")
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--seed", type=int, default=0)
    add_results(arguments, results)
    return arguments


def predicted_rows(
    options: argparse.Namespace, predictions: Mapping[str, tuple[str, Callable[[int, int, int], Result]]], *code: Path
) -> dict[str, Result]:
    """The result of each row, with `--known` of those that have one. `predictions` have what identifies a row among the
    results, and its prediction by part, seed and steps. Results depend on this file and on `code`.
    """
    results, rows = Results(options.results), dict[str, Result]()
    version = code_hash(*SIMULATED_CODE, Path(__file__), *code)
    for name, (identity, prediction) in predictions.items():
        key = f"{identity} part={options.part} steps={options.steps} seed={options.seed} code={version}"
        if not options.known:
            results.add(key, partial(prediction, options.part, options.seed, options.steps))
        if found := results.get(key):
            rows[name] = found
    return rows


def speed_of(rows: Mapping[str, Result]) -> Iterator[str]:
    """How fast the predictions were, in a line."""
    if rows:
        rates = sorted(row["trajectories_per_cpu_s"] for row in rows.values())
        speeds = sorted(row["speed"] for row in rows.values())
        yield (
            f"{rates[0]:,.0f} to {rates[-1]:,.0f} trajectories a CPU second (median {rates[len(rates) // 2]:,.0f}), "
            f"{speeds[0]:,.0f} to {speeds[-1]:,.0f} times as fast as the cluster"
        )


def _table(rows: Mapping[str, Result], options: argparse.Namespace) -> Table:
    table = Table(title="Predicted thousand tokens/s, and Laminar's speed-up over each schedule")
    for column in ("model", "GPUs", *SCHEDULES, *(f"over {name}" for name in SCHEDULES[:-1]), "paper's Laminar"):
        table.add_column(column, justify="right")
    for scale in options.scales:
        for model in options.models:
            gpus = SCALES[scale][model]
            rates = {name: rows.get(f"{model} {gpus} {name}", {}).get("tokens_per_s") for name in SCHEDULES}
            own, paper = rates["laminar"], PAPER_LAMINAR.get((model, gpus))
            cells = [f"{rate / 1000:,.0f}" if rate else "" for rate in rates.values()]
            ratios = [f"{own / rates[name]:.2f}" if own and rates[name] else "" for name in SCHEDULES[:-1]]
            table.add_row(model, str(gpus), *cells, *ratios, f"{paper / 1000:.0f} (fitted)" if paper else "")
    return table


def _summary(rows: Mapping[str, Result]) -> Iterator[str]:
    """Predicted means and maxima beside those of the paper."""
    rates = {tuple(name.split()): row["tokens_per_s"] for name, row in rows.items()}
    for schedule in SCHEDULES[:-1]:
        paper = f"{PAPER_SPEEDUP[schedule]}, {PAPER_MOST[schedule]}"
        for task, models, papers in (("", _MATH, paper), ("tool use, ", ("7B-tool",), PAPER_TOOL_SPEEDUP)):
            ratios = [
                rates[model, gpus, "laminar"] / rate
                for (model, gpus, name), rate in rates.items()
                if name == schedule and model in models and (model, gpus, "laminar") in rates
            ]
            if ratios:
                mean = sum(ratios) / len(ratios)
                yield f"{task}over {schedule}: mean {mean:.2f}, most {max(ratios):.2f} (paper, of all scales: {papers})"
    efficiency: dict[str, float] = {}
    for model in MODELS:
        small, large = SCALES["small"][model], SCALES["large"][model]
        first, last = (rates.get((model, str(gpus), "laminar")) for gpus in (small, large))
        if first and last:
            efficiency[model] = 100 * last / first / (large / small)
    if set(_MATH) <= set(efficiency):
        efficiency["all"] = sum(efficiency[model] for model in _MATH) / len(_MATH)
    for model, share in efficiency.items():
        paper = f" (paper {PAPER_EFFICIENCY[model]} %)" if model in PAPER_EFFICIENCY else ""
        yield f"scaling efficiency of {model}: {share:.1f} %{paper}"


def _staleness(rows: Mapping[str, Result]) -> Iterator[str]:
    """The shares of trajectories by the versions published while they were generated, under the schedule laminar."""
    for name, row in rows.items():
        if name.endswith(" laminar"):
            shares = row["finish_staleness"]
            each = ", ".join(f"{age}: {100 * share:.0f} %" for age, share in enumerate(shares))
            mean = sum(age * share for age, share in enumerate(shares))
            yield f"staleness at the finish, {name}: mean {mean:.2f}; {each} (paper: mean about 1.2, never above 4)"


def _kv_cycles(rows: Mapping[str, Result]) -> Iterator[str]:
    """The KV use of a replica from the load of a version to that of the next, under the schedule laminar."""
    for name, row in rows.items():
        if name.endswith(" laminar") and row["kv_cycle"]:
            each = " ".join(f"{100 * use:.0f}" for use in row["kv_cycle"])
            yield f"KV use in tenths of a version's time, {name}: {each} % (paper: rises to 99 %, then falls)"


if __name__ == "__main__":
    main()
