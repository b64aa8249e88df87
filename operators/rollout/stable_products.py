"""Shapes of products in which the bits of a row do not depend on what else is computed with it.

Math libraries choose the order of a sum by the shapes of a product. The bounds here are found by computing products
on the processor of this process; what was found where is in docs/decisions/engines.md. GPUs are not looked at.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional

from operators.rollout.kv_slots import CONTEXT_UNIT
from operators.rollout.step_plan import Prefill

LEAST_ROWS = 4
"""Products of fewer rows sum in another order on every processor that was tried."""
MOST_ROWS = 16
WIDTH_UNIT = CONTEXT_UNIT
"""Attention is over multiples of so many positions."""
MOST_WIDTH = 256
SUM_BLOCK = 256
"""MKL sums more float32 values than this (384 with AVX-512) in parts, whose lengths depend on their number."""
JOINT_WIDTH = 64
"""Causal attention has the same bits with more padding up to this width; in bfloat16 on AVX-512 no longer above 80."""


@cache
def least_rows(inputs: int, dtype: torch.dtype, device_type: str) -> int:
    """From how many rows on a product over `inputs` values sums each row in the same order, LEAST_ROWS to MOST_ROWS."""
    if device_type != "cpu":
        return LEAST_ROWS
    rows, weight = _draws(dtype, (MOST_ROWS, inputs), (MOST_ROWS, inputs))
    whole = functional.linear(rows, weight)
    other = (n for n in range(LEAST_ROWS, MOST_ROWS) if not torch.equal(functional.linear(rows[:n], weight), whole[:n]))
    return max(other, default=LEAST_ROWS - 1) + 1


@cache
def least_width(queries: int, head_size: int, scale: float, dtype: torch.dtype, device_type: str) -> int:
    """From how many keys on the scores of `queries` queries have the same bits, a multiple of WIDTH_UNIT up to
    MOST_WIDTH."""
    if device_type != "cpu":
        return WIDTH_UNIT
    rows, keys = _draws(dtype, (2, queries, head_size), (2, 2 * MOST_WIDTH, head_size))
    mask = torch.zeros((2, 1, 2 * MOST_WIDTH), dtype=dtype)

    def scores(width: int) -> torch.Tensor:
        return torch.baddbmm(mask[:, :, :width], rows, keys.transpose(1, 2)[:, :, :width], alpha=scale)

    whole = scores(2 * MOST_WIDTH)
    widths = range(WIDTH_UNIT, MOST_WIDTH, WIDTH_UNIT)
    other = (width for width in widths if not torch.equal(scores(width), whole[:, :, :width]))
    return max(other, default=0) + WIDTH_UNIT


def weighted_sums(weights: torch.Tensor, values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`weights` [heads, queries, width] @ `values` [heads, width, size]; zeros after a row's weights change no bit."""
    if weights.dtype != torch.float32 or weights.device.type != "cpu":
        return torch.bmm(weights, values, out=out)
    sums = torch.bmm(weights[:, :, :SUM_BLOCK], values[:, :SUM_BLOCK], out=out)
    for start in range(SUM_BLOCK, weights.shape[2], SUM_BLOCK):
        block = slice(start, start + SUM_BLOCK)
        sums.baddbmm_(weights[:, :, block], values[:, block])
    return sums


def attention_parts(block: Prefill, device: torch.device) -> list[tuple[int, int, int]]:
    """Which contexts of a block attend together: (first, last + 1, width) each; on a CPU long ones only with equals."""
    contexts, width = block.token_ids.shape
    if width <= JOINT_WIDTH or contexts == 1 or device.type != "cpu":
        return [(0, contexts, width)]
    lengths = np.zeros(contexts, np.int64)
    np.maximum.at(lengths, block.source // width, block.source % width + 1)
    widths = np.minimum(-(-np.maximum(lengths, JOINT_WIDTH) // WIDTH_UNIT) * WIDTH_UNIT, width)
    bounds = [0, *(np.flatnonzero(np.diff(widths)) + 1).tolist(), contexts]
    return [(first, last, int(widths[first])) for first, last in pairwise(bounds)]


def _draws(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
