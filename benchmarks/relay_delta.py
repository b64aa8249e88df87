"""Deltas between bfloat16 weights after a step of AdamW at a small learning rate, as relays transfer them.

The model has a Qwen2 shape, gradients of random tokens, and float32 master weights, published in bfloat16. Its weights
are newly initialised: the first steps of an optimizer change the most weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.models import qwen2
from benchmarks.tensor_copies import copy_tensor
from infra.models.dtypes import tensor_specs
from infra.store.deltas import apply_delta, encode_delta
from infra.store.layout import Layout

LEARNING_RATE = 1e-6

Result = TypeVar("Result")


@dataclass(frozen=True)
class DeltaCost:
    """The largest delta of several steps; times are medians, `_cpu_s` of all threads. `exact`: every delta restored
    every byte."""

    parameters: int
    full: int
    bytes: int
    changed: float
    encode_s: float
    decode_s: float
    encode_cpu_s: float
    decode_cpu_s: float
    exact: bool


def measure_delta(steps: int, repetitions: int) -> DeltaCost:
    """Train `steps` steps; encode and decode the delta of each."""
    model = Qwen2ForCausalLM(Qwen2Config(**qwen2(768, 2_304, 12, 12, 32_000, kv=4)))  # 110 M parameters
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    random = torch.Generator().manual_seed(0)
    before, layout = _file(model)
    rebuilt = np.zeros_like(before)  # allocated before, as a relay's reserved memory is
    sizes, changed, exact = [], [], True
    encode: list[tuple[float, float]] = []
    decode: list[tuple[float, float]] = []
    for _ in range(steps):
        tokens = torch.randint(0, model.config.vocab_size, (2, 64), generator=random)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after, _ = _file(model)
        old, new, out = memoryview(before), memoryview(after), memoryview(rebuilt)
        for _ in range(repetitions):
            delta, took = _timed(partial(encode_delta, old, new, layout.spans()))
            encode.append(took)
            _, took = _timed(partial(apply_delta, memoryview(delta), old, out))
            decode.append(took)
        exact = exact and np.array_equal(rebuilt, after)
        sizes.append(len(delta))
        first = len(layout.header)
        changed.append(float(np.mean(before[first:].view(np.uint16) != after[first:].view(np.uint16))))
        before = after
    return DeltaCost(
        parameters=model.num_parameters(),
        full=layout.size,
        bytes=max(sizes),
        changed=max(changed),
        encode_s=statistics.median(wall for wall, _ in encode),
        decode_s=statistics.median(wall for wall, _ in decode),
        encode_cpu_s=statistics.median(cpu for _, cpu in encode),
        decode_cpu_s=statistics.median(cpu for _, cpu in decode),
        exact=exact,
    )


def _timed(run: Callable[[], Result]) -> tuple[Result, tuple[float, float]]:
    """The result of `run`, and its wall-clock and CPU seconds."""
    began = time.perf_counter(), time.process_time()
    result = run()
    return result, (time.perf_counter() - began[0], time.process_time() - began[1])


def _file(model: torch.nn.Module) -> tuple[np.ndarray, Layout]:
    """The model's parameters in bfloat16, as the bytes of a published file."""
    tensors = {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}
    layout = Layout(tensor_specs(tensors))
    file = np.empty(layout.size, np.uint8)
    file[: len(layout.header)] = np.frombuffer(layout.header, np.uint8)
    for name, view in layout.tensor_views(memoryview(file)).items():
        copy_tensor(view, tensors[name])
    return file, layout
