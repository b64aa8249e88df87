"""The rollout engine: CUDA graphs beside eager steps and `model.generate`, refreshes, and the cost of a draw."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine_sides import through
from benchmarks.engine_weights import Feed, measure_refresh, two_versions
from benchmarks.gpu.figures import Figure, peak_bytes, seconds, synchronize
from benchmarks.gpu.machine import store_root
from benchmarks.gpu.settings import GIB, Settings
from infra.models.checkpoint_folder import load_model
from operators.rollout.engine import Engine, Request
from operators.rollout.sampling import sample
from operators.rollout.sampling_columns import SamplingColumns
from operators.rollout.transformers_engine import TransformersEngine
from schemas.records import Sampling

PROMPT = 12


def graphs(settings: Settings, model: Path) -> list[Figure]:
    """The engine as a rollout runs it: fixed shapes, on a GPU as CUDA graphs."""
    return _tokens_of_engine(settings, model, None)


def eager(settings: Settings, model: Path) -> list[Figure]:
    """The same engine without fixed shapes."""
    return _tokens_of_engine(settings, model, fixed=False)


def generate(settings: Settings, model: Path) -> list[Figure]:
    """transformers' own `generate` on one batch of as many sequences as the engine has slots."""
    plain = load_model(model, dtype_of(settings)).to(settings.device)
    prompts = torch.randint(1, 500, (settings.slots, PROMPT), device=settings.device)

    def run() -> None:
        with torch.inference_mode():
            plain.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                max_new_tokens=settings.response,
                min_new_tokens=settings.response,
            )

    took = seconds(settings.device, run, 1, 1)
    return [Figure("tokens", settings.slots * settings.response / took, "tokens/s")]


def refreshes(settings: Settings, model: Path) -> list[Figure]:
    """Tokens/s with a load of other weights every `refresh_s` seconds: every request is resumed under them."""
    engine = open_engine(settings, model)
    lengths = np.full(4 * settings.slots, settings.response)
    with two_versions(model, root_of_two(model)) as store:
        pairs = measure_refresh(Feed(engine, lengths, 8), store, settings.refresh_s, 1)
    (steady, refreshed), *_ = pairs
    kept = refreshed.over(steady).wall
    return [
        Figure("tokens without refreshes", steady.wall, "tokens/s"),
        Figure(f"tokens with one every {settings.refresh_s:g} s", refreshed.wall, "tokens/s"),
        Figure("share of tokens/s kept", kept, "", (">=", 0.95)),
    ]


def draws(settings: Settings, model: Path) -> list[Figure]:
    """One draw for every slot, with the plain distribution and with a cut by top-k and top-p."""
    rows, vocabulary = settings.slots, int(settings.shape.config["vocab_size"])
    logits = torch.randn(rows, vocabulary, device=settings.device).to(dtype_of(settings))
    ones, uniform = np.ones(rows), np.random.default_rng(0).random(rows)
    plain = SamplingColumns.of(ones, np.zeros(rows, np.int64), ones)
    cut = SamplingColumns.of(ones, np.full(rows, 50), np.full(rows, 0.95))
    figures = []
    for name, columns in (("a draw for every slot", plain), ("with top-k and top-p", cut)):
        took = seconds(settings.device, lambda c=columns: sample(logits, c, uniform), 5, 2)  # type: ignore[misc]
        figures.append(Figure(name, 1e3 * took, "ms", note=f"{rows} rows of {vocabulary:,} logits"))
    return figures


def open_engine(settings: Settings, model: Path, *, fixed: bool | None = None) -> TransformersEngine:
    """The engine over the model in folder `model`."""
    loaded = load_model(model, dtype_of(settings)).to(settings.device)
    context = PROMPT + 2 + settings.response
    return TransformersEngine(loaded, slots=settings.slots, context=max(64, context), fixed=fixed)


def root_of_two(model: Path) -> Path:
    """The folder of a store with two versions of the weights in folder `model`."""
    return store_root("gpu-check", 3 * sum(file.stat().st_size for file in model.glob("*.safetensors")))


def requests(count: int, tokens: int, round: int) -> list[Request]:
    """`count` requests for `tokens` tokens each, with prompts of their own."""
    source = np.random.default_rng([2, round])
    sampling = Sampling(1.0, 1.0, 0, tokens, (), round)
    return [Request(f"p{round}.{i}", source.integers(1, 500, PROMPT).astype(np.int32), sampling) for i in range(count)]


def _tokens_of_engine(settings: Settings, model: Path, fixed: bool | None) -> list[Figure]:
    """Tokens/s of full slots, prefill included, and the time of a decode step at full slots."""
    engine = open_engine(settings, model, fixed=fixed)
    tokens, rounds = decode_rate(settings, engine)
    return [
        Figure("tokens", tokens, "tokens/s", note="" if engine.direct else "by the model's own forward"),
        Figure("a step", 1e3 * settings.slots / tokens, "ms", note=f"{settings.slots} slots"),
        Figure("time outside engine steps", _outside(engine, settings, rounds), "%"),
        Figure("peak memory", peak_bytes(settings.device) / GIB, "GiB"),
    ]


def decode_rate(settings: Settings, engine: Engine) -> tuple[float, int]:
    """Tokens/s of full slots, prefill included, and the number of rounds, of which the first is not measured."""
    run = through(engine)
    run(requests(settings.slots, settings.response, 0))  # records every shape
    taken = []
    for round in range(1, settings.repetitions + 1):
        batch = requests(settings.slots, settings.response, round)
        synchronize(settings.device)
        began = time.perf_counter()
        run(batch)
        taken.append(time.perf_counter() - began)
    return settings.slots * settings.response / sorted(taken)[len(taken) // 2], settings.repetitions + 1


def _outside(engine: TransformersEngine, settings: Settings, round: int) -> float:
    """The share of the stepping thread's time outside of engine steps, in per cent."""
    before, began = engine.status().model_seconds, time.thread_time()
    through(engine)(requests(settings.slots, settings.response, round))
    spent = time.thread_time() - began
    return 100 * max(0.0, 1 - (engine.status().model_seconds - before) / max(spent, 1e-9))


def dtype_of(settings: Settings) -> torch.dtype:
    """The engine's data type on the device."""
    return torch.float32 if settings.device == "cpu" else torch.bfloat16
