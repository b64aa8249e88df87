"""What a step of AdamW at a small learning rate changes of bfloat16 weights, as relays are sent it.

A real model of a Qwen2 shape, real gradients of random tokens, float32 master weights as trainers keep them, published
in bfloat16. The weights are fresh from the model's own initialisation: an optimizer's first steps change the most.
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

from infra.store.deltas import apply_delta, encode_delta
from infra.store.layout import Layout
from operators.trainer.tensor_bytes import copy_tensor, tensor_specs

LEARNING_RATE = 1e-6

Result = TypeVar("Result")


@dataclass(frozen=True)
class Delta:
    """Of the last of several steps; seconds are medians, `_cpu_s` of all threads. `exact`: every delta gave back every
    byte."""

    parameters: int
    full: int
    bytes: int
    changed: float
    encode_s: float
    decode_s: float
    encode_cpu_s: float
    decode_cpu_s: float
    exact: bool


def measure_delta(steps: int, repetitions: int) -> Delta:
    """Train so many steps, and encode and decode what each has changed."""
    model = Qwen2ForCausalLM(_shape())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    random = torch.Generator().manual_seed(0)
    before, layout = _file(model)
    rebuilt = np.zeros_like(before)  # memory that is there, as a relay's reserved memory is
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
    return Delta(
        model.num_parameters(),
        layout.size,
        max(sizes),
        max(changed),
        *(statistics.median(each[clock] for each in took) for clock in (0, 1) for took in (encode, decode)),
        exact,
    )


def _timed(run: Callable[[], Result]) -> tuple[Result, tuple[float, float]]:
    """What `run` gives, and what it took: seconds, and seconds of processor time."""
    began = time.perf_counter(), time.process_time()
    result = run()
    return result, (time.perf_counter() - began[0], time.process_time() - began[1])


def _shape() -> Qwen2Config:
    """110 M parameters."""
    return Qwen2Config(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2_304,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )


def _file(model: torch.nn.Module) -> tuple[np.ndarray, Layout]:
    """The model's parameters in bfloat16, as the file that is published."""
    tensors = {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}
    layout = Layout(tensor_specs(tensors))
    file = np.empty(layout.size, np.uint8)
    file[: len(layout.header)] = np.frombuffer(layout.header, np.uint8)
    for name, place in layout.tensor_views(memoryview(file)).items():
        copy_tensor(place, tensors[name])
    return file, layout
