"""Measures the time of decode and verification passes by their number of tokens, when an engine starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from operators.rollout.draft_lengths import ForwardCost
from operators.rollout.runner import DraftRunner
from operators.rollout.sampling import sample
from operators.rollout.sampling_columns import SamplingColumns
from operators.rollout.step_plan import Decode, Verify

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Tokens of the measured passes; passes between two of them are interpolated."""
STEPS = 8
"""Steps of a measured verification, the longest draft included."""
CONTEXT = 256
"""Tokens of each row in the measured passes."""
REPETITIONS = 4

S = TypeVar("S", Decode, Verify)


def measure_forward_cost(runner: DraftRunner, rows: int, context: int) -> ForwardCost:
    """The cost of `runner`'s passes with their draws, in its first KV rows, whose contents it overwrites.

    The least of several repetitions counts, since other work on the machine only adds to them; on a CPU it is the CPU
    time of this thread.
    """
    most_steps = min(STEPS, context)
    first = min(CONTEXT, context) - most_steps
    sizes = [tokens for tokens in TOKENS if tokens <= rows * most_steps]
    decode_s, verify_s = [], []
    with torch.inference_mode():
        for tokens in sizes:
            count = min(tokens, rows)
            decode_s.append(_seconds(runner.decode, Decode(np.zeros(count, np.int64), np.full(count, first))))
            steps = max(min(tokens, most_steps), -(-tokens // rows))
            at = np.repeat(first + np.arange(steps)[:, None], tokens // steps, 1)
            verify_s.append(_seconds(runner.verify, Verify(np.zeros_like(at), at)))
    # A pass of more tokens does not take less time: where one seems to, other work disturbed the smaller one.
    risen = [np.minimum.accumulate(np.array(each)[::-1])[::-1] for each in (decode_s, verify_s)]
    return ForwardCost(np.array(sizes), *risen)


def _seconds(run: Callable[[S], torch.Tensor], step: S) -> float:
    """Least seconds of a pass and its draws."""
    found = []
    for _ in range(REPETITIONS):
        began = time.perf_counter(), time.thread_time()
        logits = run(step)
        sample(logits, SamplingColumns(None, None, None), np.full(len(logits), 0.5))
        wall, own = time.perf_counter() - began[0], time.thread_time() - began[1]
        found.append(own if logits.device.type == "cpu" else wall)
    return min(found)
