"""Engine utilisation while episodes wait for slow environments.

    OMP_NUM_THREADS=1 python -m benchmarks.environments

A constant number of episodes runs at a time. The environment replies to each turn after a lognormal time, clipped to a
range. `busy` is the share of wall-clock time in which the engine generates tokens, from the first turn until the last
episode has started.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.slow_environment import OBSERVED, latency
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from infra.models.weights import save_weights
from operators.rollout.engine import Completion, Request
from operators.rollout.environments.config import EnvironmentSpec
from operators.rollout.environments.pool import EnvironmentPool
from operators.rollout.episodes import EpisodeEngine
from operators.rollout.transformers_engine import TransformersEngine
from schemas.columns import token_ids
from schemas.records import PolicyVersion, Prompt, Sampling


class Timed(TransformersEngine):
    """Counts the seconds of steps that generated tokens."""

    seconds = 0.0

    def step(self) -> Sequence[Completion]:
        began, before = time.perf_counter(), self.status().tokens_generated
        ended = super().step()
        if self.status().tokens_generated > before:
            self.seconds += time.perf_counter() - began
        return ended


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--episodes", type=int, default=256)
    arguments.add_argument("--concurrent", type=int, default=64)
    arguments.add_argument("--turns", type=int, default=4)
    arguments.add_argument("--turn-tokens", type=int, default=48)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    latencies = [latency(episode, turn + 1) for episode in range(options.episodes) for turn in range(options.turns)]
    deciles = statistics.quantiles(latencies, n=100)
    console = Console()
    console.print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread")
    episodes = f"{options.episodes} episodes of {options.turns} turns of {options.turn_tokens} tokens"
    latency_text = f"{statistics.fmean(latencies):.2f} s (p50 {deciles[49]:.2f}, p99 {deciles[98]:.2f})"
    console.print(f"{episodes}, {options.concurrent} at a time; a reply takes {latency_text}")
    table = Table()
    for column in ("environment", "busy", "in the model (CPU)", "tokens/s", "seconds"):
        table.add_column(column, justify="left" if column == "environment" else "right")
    for name in ("benchmarks.slow_environment:Slow", ""):
        busy, model, rate, wall = measure(name, options)
        row = f"{busy:.1%}", f"{model:.1%}", f"{rate:,.0f}", f"{wall:.1f}"
        table.add_row("slow" if name else "none: one turn with the same number of tokens", *row)
    console.print(table)


def measure(name: str, options: argparse.Namespace) -> tuple[float, float, float, float]:
    """Busy share, model CPU seconds per second, tokens/s, and the seconds until the last episode started."""
    model, tokenizer = build_demo_model(DemoModelConfig())
    observed = len(tokenizer.encode(OBSERVED))
    length = options.turns * options.turn_tokens + (options.turns - 1) * observed if name else 0
    engine = Timed(model, slots=options.concurrent, context=512)
    with TemporaryDirectory() as folder:
        save_weights(model, Path(folder) / "weights")
        engine.load(Path(folder) / "weights", PolicyVersion(1, 0))
    pools = {}
    if name:
        spec = EnvironmentSpec(name, turns=options.turns, turn_tokens=options.turn_tokens, workers=options.concurrent)
        pools["Slow"] = EnvironmentPool(spec)
        warm_ups = [pools["Slow"].play(f"warm {n}", {"number": n}, (), last=True) for n in range(options.concurrent)]
        for each in warm_ups:  # wait until all worker processes have started
            each.result()
    try:
        episodes = EpisodeEngine(engine, pools, tokenizer.encode, tokenizer.decode)
        sampling = Sampling(1.0, 1.0, 0, length or options.turns * options.turn_tokens, (), 0)
        question = token_ids(tokenizer.encode("State the final answer to the following arithmetic problem: 1 + 2 ="))
        waiting = [
            Prompt(number, "train", "slow", "", question, "{}", 1, sampling, environment="Slow" if name else "")
            for number in range(options.episodes)
        ]
        began = time.perf_counter()
        running = 0
        while waiting:
            while waiting and running < options.concurrent:
                prompt = waiting.pop(0)
                episode_prompt = prompt if name else None
                episodes.submit(Request(f"p{prompt.number}.0", question.to_numpy(), sampling, None, episode_prompt))
                running += 1
            running -= len(episodes.step())
        wall = time.perf_counter() - began
        status = engine.status()
        return engine.seconds / wall, status.model_seconds / wall, status.tokens_generated / wall, wall
    finally:
        for pool in pools.values():
            pool.close()


if __name__ == "__main__":
    main()
