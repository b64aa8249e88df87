"""Whether this machine's library sums products in an order that an engine can keep."""

from __future__ import annotations

import torch

from operators.rollout.stable_products import MOST_ROWS, WIDTH_UNIT, least_rows, weighted_sums


def sums_in_one_order(dtype: torch.dtype, *widths: int, context: int = 64) -> bool:
    """Whether products over `widths` inputs do for every number of rows to which an engine pads, and those of
    attention weights for every width up to `context`."""
    for width in widths:
        x, weight = torch.randn(64, width).to(dtype), torch.randn(80, width).to(dtype)
        whole = torch.nn.functional.linear(x, weight)
        for rows in (least_rows(width, dtype, "cpu"), MOST_ROWS, 20, 33):
            if not torch.equal(torch.nn.functional.linear(x[:rows], weight), whole[:rows]):
                return False
    weights, values = torch.zeros(2, 2, context, dtype=dtype), torch.randn(2, context, 32).to(dtype)
    for width in range(WIDTH_UNIT, context, WIDTH_UNIT):
        weights[:, :, :width] = torch.rand(2, 2, width).to(dtype)
        if not torch.equal(weighted_sums(weights, values), weighted_sums(weights[..., :width], values[:, :width])):
            return False
    return True
