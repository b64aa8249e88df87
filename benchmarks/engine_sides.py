"""The generators that benchmarks/engine.py compares: Laminar's engines, `model.generate` and bare vLLM, on one model.

Every side receives the same requests: prompts of 8 to 13 tokens shared by groups, no stop tokens, temperature 1.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from benchmarks.models import NO_END, qwen2
from operators.rollout.engine import Completion, Engine, Request
from operators.rollout.transformers_engine import TransformersEngine
from schemas.records import Sampling

VOCABULARY, CONTEXT = 128, 512
MEDIAN, LONGEST = 39, 400
_P99_OVER_P50 = 4.7
_Z99 = 2.3263  # the 99th percentile of the normal distribution

HAS_VLLM = importlib.util.find_spec("vllm") is not None
Side = Callable[[Sequence[Request]], None]
"""Generates responses to all requests."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure by the wall clock and by this process's CPU time, which other work on the machine affects less."""

    wall: float
    cpu: float

    def over(self, other: Measured) -> Measured:
        """The ratio to `other`, by each clock."""
        return Measured(self.wall / other.wall, self.cpu / other.cpu)


def now() -> Measured:
    """The current seconds of both clocks."""
    return Measured(time.perf_counter(), time.process_time())


def since(before: Measured) -> Measured:
    """Seconds since `before`, by each clock."""
    passed = now()
    return Measured(passed.wall - before.wall, passed.cpu - before.cpu)


def make_folder(folder: Path, *, hidden: int = 128, layers: int = 3, mlp: int = 384, heads: int = 4) -> None:
    """Save a random Qwen2 in `folder`; its default size is that of the demonstration's model."""
    torch.manual_seed(0)
    sizes = qwen2(hidden, mlp, layers, heads, VOCABULARY, heads // 2, CONTEXT)
    Qwen2ForCausalLM(Qwen2Config(**sizes, **NO_END)).save_pretrained(folder)


def long_tailed(requests: int) -> np.ndarray:
    """Lognormal lengths in tokens with the median and tail of the demonstration's long task."""
    spread = np.log(_P99_OVER_P50) / _Z99
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), spread, requests)
    return np.clip(drawn.round(), 1, LONGEST).astype(np.int64)


def requests_of(lengths: np.ndarray, group: int, round: int = 0) -> list[Request]:
    """One request per length; `group` requests share a prompt. Each `round` has other requests."""
    generator = np.random.default_rng([1, round])
    requests = []
    for i, length in enumerate(lengths.tolist()):
        if i % group == 0:
            prompt = generator.integers(1, VOCABULARY, generator.integers(8, 14)).astype(np.int32)
        sampling = Sampling(1.0, 1.0, 0, length, (), round)
        requests.append(Request(f"p{round}.{i // group}.{i % group}", prompt, sampling))
    return requests


def open_transformers(folder: Path, slots: int) -> TransformersEngine:
    """The transformers engine with the model in `folder`."""
    return TransformersEngine(AutoModelForCausalLM.from_pretrained(folder), slots=slots)


def open_vllm_engine(folder: Path, slots: int) -> Engine:
    """The vLLM engine with the model in `folder`."""
    from operators.rollout.vllm_engine import VllmEngine, open_vllm

    return VllmEngine(open_vllm(folder, slots=slots, context=CONTEXT))


def completions(engine: Engine, requests: Sequence[Request]) -> dict[str, Completion]:
    """Generate responses to `requests` by the steps of `engine`; returns them by trajectory."""
    for request in requests:
        engine.submit(request)
    done: dict[str, Completion] = {}
    while len(done) < len(requests):
        done |= {each.trajectory_id: each for each in engine.step()}
    return done


def through(engine: Engine) -> Side:
    """A side that generates by the steps of `engine`."""

    def run(requests: Sequence[Request]) -> None:
        completions(engine, requests)

    return run


def generate(folder: Path, slots: int) -> Side:
    """`model.generate` on left-padded batches of `slots`. A batch runs until its longest request ends; surplus tokens
    are not counted."""
    model = AutoModelForCausalLM.from_pretrained(folder)

    def run(requests: Sequence[Request]) -> None:
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

    return run


def bare_vllm(folder: Path, slots: int, *, seeded: bool = False) -> Side:
    """`LLM.generate` in this process, with the arguments of Laminar's vLLM engine; it returns every token's logprob.
    With `seeded` each request has a seed."""
    from operators.rollout.vllm_engine import (
        engine_arguments,
    )  # first: both read the environment variables that it sets

    from vllm import LLM, SamplingParams  # isort: skip

    llm = LLM(model=str(folder), skip_tokenizer_init=True, **engine_arguments(folder, slots=slots, context=CONTEXT))

    def run(requests: Sequence[Request]) -> None:
        prompts = [{"prompt_token_ids": request.prompt.tolist()} for request in requests]
        sampling = [
            SamplingParams(
                temperature=1.0,
                max_tokens=request.sampling.max_new_tokens,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                seed=number if seeded else None,
            )
            for number, request in enumerate(requests)
        ]
        llm.generate(prompts, sampling, use_tqdm=False)

    return run


def emulated(slots: int) -> Side:
    """The emulated engine on a clock that advances to the next event: it measures the cost of an emulated token."""
    from operators.rollout.emulated_engine import EmulatedEngine, emulated_scheduling
    from operators.rollout.emulation_config import EngineEmulation, LengthsConfig
    from operators.rollout.response_lengths import open_lengths
    from operators.rollout.roofline import Roofline

    now = [0.0]
    emulation = EngineEmulation()
    engine = EmulatedEngine(
        emulated_scheduling(slots, CONTEXT, None, emulation),
        Roofline(emulation.roofline),
        open_lengths(LengthsConfig(p50=MEDIAN, p99=LONGEST)),
        clock=lambda: now[0],
        status_refresh_s=0.0,
    )

    def run(requests: Sequence[Request]) -> None:
        for request in requests:
            engine.submit(request)
        left = len(requests)
        while left:
            now[0] += engine.due() + 1e-9
            left -= len(engine.step())

    return run


def with_cpu_time(spent: dict[str, float], name: str, call: Callable[..., Any]) -> Any:
    """Wrap `call` to add its CPU seconds to `spent[name]`."""

    @functools.wraps(call)
    def timed(*arguments: Any, **named: Any) -> Any:
        before = now()
        try:
            return call(*arguments, **named)
        finally:
            spent[name] = spent.get(name, 0.0) + since(before).cpu

    return timed


OPENERS: dict[str, Callable[[Path, int], Engine]] = {"transformers": open_transformers, "vllm": open_vllm_engine}
OTHERS: dict[str, Callable[[Path, int], Side]] = {
    "generate": generate,
    "bare vllm": bare_vllm,
    "seeded vllm": functools.partial(bare_vllm, seeded=True),
}
"""By name: a function of model folder and number of slots."""
