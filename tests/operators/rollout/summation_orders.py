"""Whether this machine's library sums products in an order that an engine can keep."""

from __future__ import annotations

import itertools

import torch

from operators.rollout.stable_products import MOST_ROWS, WIDTH_UNIT, least_rows


def sums_in_one_order(dtype: torch.dtype, *widths: int) -> bool:
    """Whether products over `widths` inputs do for every number of rows to which an engine pads, and sums of up to 256
    attention weights whatever zeros follow them."""
    for width in widths:
        x, weight = torch.randn(64, width).to(dtype), torch.randn(80, width).to(dtype)
        whole = torch.nn.functional.linear(x, weight)
        for rows in (least_rows(width, dtype, "cpu"), MOST_ROWS, 20, 33):
            if not torch.equal(torch.nn.functional.linear(x[:rows], weight), whole[:rows]):
                return False
    values = torch.randn(2, 256, 32).to(dtype)
    for queries, width in itertools.product((2, 3), range(WIDTH_UNIT, 256, WIDTH_UNIT)):
        weights = torch.rand(2, queries, 256).to(dtype)
        weights[:, :, width:] = 0
        if not torch.equal(weights @ values, weights[..., :width] @ values[:, :width]):
            return False
    return True
