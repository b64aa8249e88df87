"""Tokens/s of the rollout engines beside `model.generate` and bare vLLM, and the cost of loading weights.

    OMP_NUM_THREADS=1 python -m benchmarks.engine                     # transformers engine, emulated, model.generate
    OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.engine      # also vLLM (make vllm-env)

Same model, same requests, one process; the sides alternate, and ratios are medians over repetitions. `generate` takes
the requests in left-padded batches of as many as the engine has slots. Bare vLLM is `LLM.generate` in this process with
the same arguments as Laminar's vLLM engine, and returns each token's logprob. Seeded vLLM has a seed for each request,
the nearest equivalent of draws that depend on trajectory and position alone. A swap loads a version from shared memory.
A refresh releases all running requests, loads a version, and resumes the requests.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import engine_sides as sides
from benchmarks.engine_sides import Measured
from benchmarks.engine_weights import Feed, measure_refresh, measure_swap, two_versions
from operators.rollout import transformers_engine
from operators.rollout.engine import Engine, Request

PARTS = ("tokens", "shares", "swap", "refresh")
BESIDE = {"transformers": ("generate", 1.0), "vllm": ("bare vllm", 0.95)}
"""The baseline of each engine, and the least ratio of their tokens/s at equal lengths."""
_LARGE = {"hidden": 1024, "layers": 8, "mlp": 2816, "heads": 16}
"""A model large enough to measure a swap by its bytes: 90 M parameters, 359 MB."""


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--slots", type=int, default=32)
    arguments.add_argument("--requests", type=int, default=256)
    arguments.add_argument("--group", type=int, default=8, help="requests that share a prompt")
    arguments.add_argument("--repetitions", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--every", type=float, default=2.0, help="seconds from refresh to refresh")
    arguments.add_argument("--engines", nargs="+", choices=BESIDE, help="by default all that are installed")
    arguments.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = arguments.parse_args()
    options.engines = options.engines or [name for name in BESIDE if name != "vllm" or sides.HAS_VLLM]
    torch.set_num_threads(options.threads)
    console = Console(width=120)
    console.print(f"{_machine()}, {options.threads} thread(s), torch {torch.__version__}")
    with tempfile.TemporaryDirectory(prefix="laminar-engines-") as scratch:
        small = Path(scratch) / "small"
        sides.make_folder(small)
        if "tokens" in options.only or "refresh" in options.only:
            engines = {name: sides.OPENERS[name](small, options.slots) for name in options.engines}
            if "tokens" in options.only:
                console.print(_tokens(engines, small, options))
            if "refresh" in options.only:
                console.print(_refreshes(engines, small, options))
            for engine in engines.values():
                engine.close()
        if "shares" in options.only and "transformers" in options.engines:
            console.print(_shares(small, options))
        if "swap" in options.only:
            console.print(_swaps(Path(scratch) / "large", options))


def _lengths(requests: int) -> dict[str, np.ndarray]:
    return {"equal": np.full(requests, sides.MEDIAN), "long-tailed": sides.long_tailed(requests)}


def _tokens(engines: Mapping[str, Engine], folder: Path, options: argparse.Namespace) -> Table:
    table = Table(title=f"Tokens/s, {options.slots} slots, {options.requests} requests")
    wanted = [BESIDE[name][0] for name in engines] + ["seeded vllm"] * ("vllm" in engines)
    others = {other: sides.OTHERS[other](folder, options.slots) for other in wanted}
    all_sides = {name: sides.through(engine) for name, engine in engines.items()} | others
    all_sides["emulated"] = sides.emulated(options.slots)
    for column in (
        "lengths, p50 / p99",
        "engine",
        "tokens/s",
        "per CPU s",
        "baseline",
        "ratio (min-max)",
        "by CPU",
        "goal",
    ):
        table.add_column(column, justify="left" if column in ("lengths, p50 / p99", "engine", "baseline") else "right")
    for name, lengths in _lengths(options.requests).items():
        what = f"{name}, {np.percentile(lengths, 50):.0f} / {np.percentile(lengths, 99):.0f}"
        taken = _alternate(all_sides, lengths, options)
        for engine_name, each in taken.items():
            rates = [f"{lengths.sum() / statistics.median(column):,.0f}" for column in _columns(each)]
            table.add_row(
                what,
                engine_name,
                *rates,
                *(_beside(engine_name, taken, goal=name == "equal") if engine_name in BESIDE else ()),
            )
            what = ""
        table.add_section()
    return table


def _beside(engine_name: str, taken: Mapping[str, Sequence[Measured]], *, goal: bool) -> tuple[str, ...]:
    """The name of the baseline, the ratios to it by both clocks, and the goal if there is one."""
    other, least = BESIDE[engine_name]
    ratios = [baseline.over(own) for own, baseline in zip(taken[engine_name], taken[other], strict=True)]
    return other, *map(_spread, _columns(ratios)), f"≥ {least}" if goal else ""


def _columns(figures: Sequence[Measured]) -> tuple[list[float], list[float]]:
    """Wall-clock times, and CPU times."""
    return [figure.wall for figure in figures], [figure.cpu for figure in figures]


def _spread(figures: Sequence[float]) -> str:
    return f"{statistics.median(figures):.2f} ({min(figures):.2f}-{max(figures):.2f})"


def _alternate(
    all_sides: Mapping[str, sides.Side], lengths: np.ndarray, options: argparse.Namespace
) -> dict[str, list[Measured]]:
    """Seconds of each side's repetitions, after one warm-up; each repetition has other requests."""
    taken: dict[str, list[Measured]] = {name: [] for name in all_sides}
    for repetition in range(options.repetitions + 1):
        requests = sides.requests_of(lengths, options.group, repetition)
        for name, side in all_sides.items():
            taken[name].append(_measured(lambda run=side, batch=requests: run(batch)))
    return {name: each[1:] for name, each in taken.items()}


def _shares(folder: Path, options: argparse.Namespace) -> Table:
    table = Table(title="Where the transformers engine's CPU time goes")
    for column in ("lengths", "attention", "projections, MLP, norms", "sampling", "bookkeeping"):
        table.add_column(column, justify="left" if column == "lengths" else "right")
    for name, lengths in _lengths(options.requests).items():
        shares = _breakdown(folder, sides.requests_of(lengths, options.group), options.slots)
        table.add_row(name, *(f"{share:.0%}" for share in shares))
    return table


def _breakdown(folder: Path, requests: Sequence[Request], slots: int) -> tuple[float, ...]:
    """Shares of CPU time in attention, the rest of the forward pass, sampling, and everything else."""
    engine = sides.open_transformers(folder, slots)
    spent: dict[str, float] = {}
    runner: Any = engine._runner  # the benchmark measures private methods
    for part in ("_attend", "_attend_causally"):
        setattr(runner, part, sides.with_cpu_time(spent, "attention", getattr(runner, part)))
    engine._kv.write = sides.with_cpu_time(spent, "attention", engine._kv.write)  # type: ignore[method-assign]
    runner.decode = sides.with_cpu_time(spent, "forward", runner.decode)
    originals = transformers_engine.sample, transformers_engine.uniforms
    drawing = [sides.with_cpu_time(spent, "sampling", call) for call in originals]
    transformers_engine.sample, transformers_engine.uniforms = drawing
    try:
        total = _measured(lambda: sides.through(engine)(requests)).cpu
    finally:
        transformers_engine.sample, transformers_engine.uniforms = originals
    rest = total - spent["forward"] - spent["sampling"]
    parts = (spent["attention"], spent["forward"] - spent["attention"], spent["sampling"], rest)
    return tuple(part / total for part in parts)


def _refreshes(engines: Mapping[str, Engine], folder: Path, options: argparse.Namespace) -> Table:
    table = Table(title=f"With a refresh every {options.every:g} s; goal: at most 5 % less")
    for column in ("engine", "tokens/s without", "with", "cost (min-max)", "by CPU"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    with two_versions(folder) as store:
        for name, engine in engines.items():
            feed = Feed(engine, sides.long_tailed(options.requests), options.group)
            pairs = measure_refresh(feed, store, options.every, options.repetitions)
            rates = [f"{statistics.median(rate.wall for rate in column):,.0f}" for column in zip(*pairs, strict=True)]
            left = _columns([refreshed.over(steady) for steady, refreshed in pairs])
            costs = [sorted(1 - share for share in column) for column in left]
            shown = [f"{statistics.median(each):.1%} ({each[0]:.1%} - {each[-1]:.1%})" for each in costs]
            table.add_row(name, *rates, *shown)
    return table


def _swaps(folder: Path, options: argparse.Namespace) -> Table:
    table = Table(title="A swap of weights, beside one thread's copy of the same number of bytes")
    for column in ("engine", "MB", "swap, ms", "copy, ms", "ratio (min-max)", "by CPU"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    sides.make_folder(folder, **_LARGE)
    with two_versions(folder) as store:
        for name in options.engines:
            engine = sides.OPENERS[name](folder, 2)
            size, pairs = measure_swap(engine, store, options.repetitions)
            engine.close()
            took = [
                f"{1e3 * statistics.median(each.wall for each in column):.0f}" for column in zip(*pairs, strict=True)
            ]
            ratios = _columns([load.over(copy) for load, copy in pairs])
            table.add_row(name, f"{size / 1e6:.0f}", *took, *map(_spread, ratios))
    return table


def _measured(call: Callable[[], object]) -> Measured:
    before = sides.now()
    call()
    return sides.since(before)


def _machine() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name} ({platform.system()}, Python {platform.python_version()})"


if __name__ == "__main__":
    main()
