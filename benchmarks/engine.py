"""Tokens per second of the rollout engine against `model.generate`, on the same model and requests, in one run.

    OMP_NUM_THREADS=1 python benchmarks/engine.py

`generate` takes the requests in batches of as many as the engine has slots, left-padded, with the same sampling. A
batch runs to its longest request; its surplus tokens are not counted. Repetitions alternate between the two.
"""

from __future__ import annotations

import argparse
import functools
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from operators.rollout import transformers_engine
from operators.rollout.engine import Request
from operators.rollout.transformers_engine import TransformersEngine
from schemas.records import Sampling

_VOCABULARY = 128
_CONTEXT = 512
_MEDIAN = 39
_LONGEST = 400
_P99_OVER_P50 = 4.7
_Z99 = 2.3263  # the 99th percentile of the normal distribution


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--slots", type=int, default=32)
    arguments.add_argument("--requests", type=int, default=256)
    arguments.add_argument("--group", type=int, default=8, help="requests that share a prompt")
    arguments.add_argument("--repetitions", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=1)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)

    console = Console()
    console.print(f"{_machine()}, {options.threads} thread(s), torch {torch.__version__}")
    model = _model()
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    table = Table(title=f"Qwen2, {millions:.2f} M parameters, {options.slots} slots, {options.requests} requests")
    for column in ("lengths", "p50 / p99", "engine tokens/s", "generate tokens/s", "ratio (min-max)", "target"):
        table.add_column(column, justify="left" if column == "lengths" else "right")
    shares = Table(title="Where the engine's time goes")
    for column in ("lengths", "attention", "projections, MLP, norms", "sampling", "bookkeeping"):
        shares.add_column(column, justify="left" if column == "lengths" else "right")

    for name, lengths, target in (
        ("equal", np.full(options.requests, _MEDIAN), 1.0),
        ("long-tailed", _long_tailed(options.requests), 2.0),
    ):
        requests = _requests(lengths, options.group)
        ours, theirs = _alternate(model, requests, options.slots, options.repetitions)
        ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
        tokens = int(lengths.sum())
        table.add_row(
            name,
            f"{np.percentile(lengths, 50):.0f} / {np.percentile(lengths, 99):.0f}",
            f"{tokens / statistics.median(ours):,.0f}",
            f"{tokens / statistics.median(theirs):,.0f}",
            f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})",
            f"{target:.1f}x",
        )
        shares.add_row(name, *(f"{share:.0%}" for share in _breakdown(model, requests, options.slots)))
    console.print(table)
    console.print(shares)


def _model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        tie_word_embeddings=True,
        max_position_embeddings=_CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()


def _long_tailed(requests: int) -> np.ndarray:
    """Lognormal lengths in tokens with the median and tail of the demonstration's long task."""
    spread = np.log(_P99_OVER_P50) / _Z99
    drawn = np.random.default_rng(0).lognormal(np.log(_MEDIAN), spread, requests)
    return np.clip(drawn.round(), 1, _LONGEST).astype(np.int64)


def _requests(lengths: np.ndarray, group: int) -> list[Request]:
    """One request a length, no stop tokens, prompts of 8 to 13 tokens that `group` requests share."""
    generator = np.random.default_rng(1)
    requests = []
    for i, length in enumerate(lengths.tolist()):
        if i % group == 0:
            prompt = generator.integers(1, _VOCABULARY, generator.integers(8, 14)).astype(np.int32)
        requests.append(Request(f"p{i // group}.{i % group}", prompt, Sampling(1.0, 1.0, 0, length, (), 0)))
    return requests


def _alternate(
    model: PreTrainedModel, requests: Sequence[Request], slots: int, repetitions: int
) -> tuple[list[float], list[float]]:
    """Seconds of each repetition, engine and generate, after one of each to warm up."""
    engine = TransformersEngine(model, slots=slots)
    ours, theirs = [], []
    for _ in range(repetitions + 1):
        ours.append(_seconds(lambda: _run_engine(engine, requests)))
        theirs.append(_seconds(lambda: _run_generate(model, requests, slots)))
    return ours[1:], theirs[1:]


def _run_engine(engine: TransformersEngine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.submit(request)
    left = len(requests)
    while left:
        left -= len(engine.step())


def _run_generate(model: PreTrainedModel, requests: Sequence[Request], slots: int) -> None:
    for first in range(0, len(requests), slots):
        batch = requests[first : first + slots]
        width = max(len(request.prompt) for request in batch)
        token_ids = torch.zeros((len(batch), width), dtype=torch.int64)
        for row, request in enumerate(batch):
            token_ids[row, width - len(request.prompt) :] = torch.from_numpy(request.prompt)
        longest = max(request.sampling.max_new_tokens for request in batch)
        with torch.inference_mode():
            model.generate(
                token_ids,
                attention_mask=(token_ids > 0).long(),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=longest,
                min_new_tokens=longest,
            )


def _breakdown(model: PreTrainedModel, requests: Sequence[Request], slots: int) -> tuple[float, ...]:
    """Shares of a run spent in attention, the rest of the forward, sampling, and everything else."""
    engine = TransformersEngine(model, slots=slots)
    spent: Counter[str] = Counter()
    runner: Any = engine._runner  # the one place that looks inside, to measure it

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                spent[name] += time.perf_counter() - start

        return timed

    for part in ("_attend", "_attend_causally"):
        setattr(runner, part, watched("attention", getattr(runner, part)))
    engine._kv.write = watched("attention", engine._kv.write)  # type: ignore[method-assign]
    runner.decode = watched("forward", runner.decode)
    originals = transformers_engine.sample, transformers_engine.uniforms
    transformers_engine.sample, transformers_engine.uniforms = (watched("sampling", call) for call in originals)
    try:
        total = _seconds(lambda: _run_engine(engine, requests))
    finally:
        transformers_engine.sample, transformers_engine.uniforms = originals
    rest = total - spent["forward"] - spent["sampling"]
    parts = (spent["attention"], spent["forward"] - spent["attention"], spent["sampling"], rest)
    return tuple(part / total for part in parts)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _machine() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name} ({platform.system()}, Python {platform.python_version()})"


if __name__ == "__main__":
    main()
