"""Causal attention over packed sequences by flash-attn's kernel for variable lengths, on GPUs where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Tensor]
_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
_FIRST_CAPABILITY = (8, 0)
"""Of Ampere, the first architecture that FlashAttention-2 (arXiv 2307.08691) supports."""


def varlen_kernel(query: Tensor) -> Kernel | None:
    """`flash_attn_varlen_func` if it is installed and can compute with `query` [1, h, t, d]; None: use SDPA.

    Under autocast it computes in the dtype to which that casts, as SDPA does.
    """
    if query.device.type != "cuda" or query.shape[-1] > _LARGEST_HEAD or _dtype_of(query) not in _DTYPES:
        return None
    return _installed() if torch.cuda.get_device_capability(query.device) >= _FIRST_CAPABILITY else None


def varlen_attention(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None
) -> Tensor:
    """Attention of `kernel` within each sequence: query float[1, h, t, d], key and value float[1, h_kv, t, d].

    Sequence i has the tokens from `starts[i]` to `starts[i + 1]` (int32[n + 1]), at most `longest`. Returns float[t, h,
    d], of the sequences in their order: nothing is padded or moved.
    """
    dtype = _dtype_of(query)
    tokens = [each[0].transpose(0, 1).to(dtype) for each in (query, key, value)]
    return kernel(*tokens, starts, starts, longest, longest, softmax_scale=scaling, causal=True)


def _dtype_of(query: Tensor) -> torch.dtype:
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


@cache
def _installed() -> Kernel | None:
    try:
        import flash_attn  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    module: Any = flash_attn
    kernel: Kernel = module.flash_attn_varlen_func
    return kernel
