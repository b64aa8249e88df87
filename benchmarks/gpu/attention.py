"""The packed attention by each kernel that torch and flash-attn have, forward and backward, in both precisions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.figures import Figure, seconds
from benchmarks.gpu.settings import Settings
from operators.trainer.packed_attention import (
    Kernel,
    PackedLayout,
    attention_in_blocks,
    lay_out,
    varlen_attention,
    varlen_kernel,
)

_KERNELS = {
    "chosen by torch": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention(settings: Settings, model: Path) -> list[Figure]:
    """Milliseconds of one layer's attention over packed sequences; a kernel that refuses has the reason as note."""
    lengths = np.array(settings.attention_lengths)
    figures = []
    for precision in (torch.bfloat16, torch.float32):
        name = str(precision).removeprefix("torch.")
        inputs = _inputs(settings, int(lengths.sum()), precision)
        packed = lay_out(lengths, torch.device(settings.device))
        for kernel, backend in _KERNELS.items():
            if settings.device == "cpu" and kernel in ("efficient", "cudnn"):
                continue

            def ours(*parts: Tensor, packed: PackedLayout = packed) -> Tensor:
                return attention_in_blocks(*parts, packed, None)

            figures.append(_measure(settings, f"{name}, {kernel}", ours, inputs, backend))
        if (kernel_of := varlen_kernel(inputs[0])) is not None:
            varlen = partial(_varlen, kernel_of, packed)
            figures.append(_measure(settings, f"{name}, flash-attn varlen", varlen, inputs, None))
        if settings.device != "cpu" and precision == torch.bfloat16:
            torch_varlen = partial(_torch_varlen, packed)
            figures.append(_measure(settings, f"{name}, torch's varlen", torch_varlen, inputs, None))
    return figures


def _inputs(settings: Settings, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values of one layer, [1, heads, tokens, size], with gradients."""
    shape = settings.shape.config
    heads, size = int(shape["num_attention_heads"]), int(shape["hidden_size"]) // int(shape["num_attention_heads"])
    counts = heads, int(shape["num_key_value_heads"]), int(shape["num_key_value_heads"])
    return [
        torch.randn(1, count, tokens, size, device=settings.device, dtype=dtype, requires_grad=True) for count in counts
    ]


def _measure(
    settings: Settings, name: str, call: Callable[..., Tensor], inputs: list[Tensor], backend: SDPBackend | None
) -> Figure:
    def run() -> None:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            out = call(*inputs)
        torch.autograd.backward(out.float().sum(), inputs=inputs)

    try:
        return Figure(name, 1e3 * seconds(settings.device, run, settings.repetitions), "ms")
    except RuntimeError as error:  # no such kernel for these inputs, or too little memory
        return Figure(name, float("nan"), "ms", note=str(error).splitlines()[0][:60])


def _varlen(kernel: Kernel, packed: PackedLayout, *parts: Tensor) -> Tensor:
    return varlen_attention(kernel, *parts, packed.starts, packed.longest, None)


def _torch_varlen(packed: PackedLayout, *parts: Tensor) -> Tensor:
    """Torch's own kernel for variable lengths, which no test runs: it has none for a CPU."""
    from torch.nn.attention.varlen import varlen_attn

    tokens = [each.squeeze(0).transpose(0, 1) for each in parts]
    causal: Any = {"window_size": (-1, 0)}
    if "enable_gqa" in signature(varlen_attn).parameters:
        causal["enable_gqa"] = True
    return varlen_attn(*tokens, packed.starts, packed.starts, packed.longest, packed.longest, **causal)
