"""The vLLM engine, where vLLM is installed: tokens/s with both samplers, loads, FP8, sleep and wake.

vLLM is imported by the parts themselves: the process from which they are forked must not use a GPU.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.engine_sides import completions
from benchmarks.engine_weights import VERSIONS, load_version, two_versions
from benchmarks.gpu.engine import PROMPT, decode_rate, requests, root_of_two
from benchmarks.gpu.figures import Figure, seconds
from benchmarks.gpu.settings import GIB, Settings
from infra.models.checkpoint_folder import load_model
from infra.models.weights import load_weights
from operators.rollout.engine import Completion, Request
from schemas.records import TokenSampler

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from operators.rollout.vllm_engine import VllmEngine

Measure = Callable[[Settings, Path], list[Figure]]
MEMORY_SHARE = 0.6
"""Of the GPU's memory that vLLM takes: the model that checks its logprobs takes some of the rest."""


def _if_installed(measure: Measure) -> Measure:
    @wraps(measure)
    def checked(settings: Settings, model: Path) -> list[Figure]:
        if importlib.util.find_spec("vllm") is None:
            return [Figure("tokens", math.nan, "tokens/s", note="vLLM is not installed")]
        return measure(settings, model)

    return checked


@_if_installed
def laminar_draws(settings: Settings, model: Path) -> list[Figure]:
    """Draws that any engine repeats, and loads of versions from the store."""
    with _opened(settings, model, "laminar") as (engine, _):
        return [*_speed(settings, engine), *_loads(settings, model, engine)]


@_if_installed
def vllm_sampler(settings: Settings, model: Path) -> list[Figure]:
    """vLLM's own sampler."""
    with _opened(settings, model, "vllm") as (engine, _):
        return _speed(settings, engine)


@_if_installed
def fp8(settings: Settings, model: Path) -> list[Figure]:
    """Weights in FP8, and how far its logprobs are from those of the weights in float32."""
    if settings.device == "cpu":
        return [Figure("tokens", math.nan, "tokens/s", note="FP8 needs a GPU")]
    with _opened(settings, model, "vllm", quantization="fp8") as (engine, _):
        return [*_speed(settings, engine), *_loads(settings, model, engine, goal=None)]


@_if_installed
def sleep(settings: Settings, model: Path) -> list[Figure]:
    """Time and memory of sleep and wake, after which the same requests must get the same tokens."""
    from operators.rollout.vllm_engine import finish_steps

    options = {"enable_sleep_mode": True} if settings.device != "cpu" else {}
    with _opened(settings, model, "laminar", **options) as (engine, vllm):
        core, batch = vllm.engine_core, requests(settings.slots, settings.response, 0)
        before, free = completions(engine, batch), _free(settings)
        finish_steps(vllm)
        began = time.perf_counter()
        core.sleep(1)
        slept, freed = time.perf_counter() - began, _free(settings) - free
        began = time.perf_counter()
        core.wake_up()
        woken = time.perf_counter() - began
        after = completions(engine, batch)
    equal = sum((before[name].generated.token_ids == after[name].generated.token_ids).all() for name in before)
    return [
        Figure("sleep", 1e3 * slept, "ms", note="weights to the host's memory"),
        Figure("memory freed", freed / GIB, "GiB"),
        Figure("wake", 1e3 * woken, "ms"),
        Figure("responses equal after it", equal / len(before), "", (">=", 0.99)),
    ]


@contextmanager
def _opened(
    settings: Settings, model: Path, token_sampler: TokenSampler, **options: Any
) -> Iterator[tuple[VllmEngine, LLMEngine]]:
    from operators.rollout.vllm_engine import VllmEngine, open_vllm

    if settings.device != "cpu":
        options["gpu_memory_utilization"] = MEMORY_SHARE
    vllm = open_vllm(
        model,
        token_sampler=token_sampler,
        slots=settings.slots,
        context=max(64, PROMPT + 2 + settings.response),
        dtype="float32" if settings.device == "cpu" else "bfloat16",
        **options,
    )
    engine = VllmEngine(vllm)
    try:
        yield engine, vllm
    finally:
        engine.close()


def _speed(settings: Settings, engine: VllmEngine) -> list[Figure]:
    rate, rounds = decode_rate(settings, engine)
    steps = rounds * settings.response
    scheduling = engine.status().model_seconds / steps
    return [
        Figure("tokens", rate, "tokens/s"),
        Figure("a step", 1e3 * settings.slots / rate, "ms", note=f"{settings.slots} slots"),
        Figure("CPU time of a step", 1e3 * scheduling, "ms"),
    ]


def _loads(
    settings: Settings, model: Path, engine: VllmEngine, goal: tuple[str, float] | None = ("<=", 0.01)
) -> list[Figure]:
    """The time of a load, and the mismatch of tokens that are drawn after it."""
    with two_versions(model, root_of_two(model)) as store:
        size, numbers = store.path(VERSIONS[0]).stat().st_size, iter(range(1 << 20))
        took = seconds(
            settings.device, lambda: load_version(engine, store, VERSIONS[next(numbers) % 2]), settings.repetitions
        )
        assert engine.version is not None
        batch = requests(settings.slots, settings.response, 1 << 10)
        kl, mean = _mismatch(settings, model, store.path(engine.version), batch, completions(engine, batch))
    return [
        Figure("load of a version", 1e3 * took, "ms", note=f"{size / took / 1e9:.1f} GB/s"),
        Figure("mismatch with its weights in float32", kl, "nats", goal, note=f"k3; mean |Δ| {mean:.2g}"),
    ]


def _mismatch(
    settings: Settings, model: Path, version: Path, batch: list[Request], done: Mapping[str, Completion]
) -> tuple[float, float]:
    """k3 and the mean of |Δ| of the logprobs of `done` beside those of the weights `version` in float32."""
    plain = load_model(model, torch.float32)
    load_weights(plain, version, rounds=True)
    plain.to(settings.device)
    off = []
    with torch.inference_mode():
        for request in batch:
            found = done[request.trajectory_id].generated
            ids = torch.from_numpy(np.concatenate([request.prompt, found.token_ids]).astype(np.int64))[None]
            logits = plain(input_ids=ids.to(settings.device)).logits[0, len(request.prompt) - 1 : -1]
            of_response = ids[0, len(request.prompt) :, None].to(settings.device)
            exact = logits.log_softmax(-1).gather(1, of_response)[:, 0].cpu().numpy()
            off.append(exact.astype(np.float64) - found.logprobs)
    delta = np.concatenate(off)
    return float((np.exp(delta) - delta - 1).mean()), float(np.abs(delta).mean())


def _free(settings: Settings) -> int:
    return 0 if settings.device == "cpu" else int(torch.cuda.mem_get_info()[0])
