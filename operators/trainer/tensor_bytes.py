"""Tensors for the weight store: specs with safetensors dtypes, and copies into the store's memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from schemas.records import TensorSpec

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def tensor_specs(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """Names, dtypes and shapes of `tensors`. Raises ValueError for a dtype that weight files do not support."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}; supported are {', '.join(map(str, _DTYPES))}")
    return [TensorSpec(name, _DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]


def copy_tensor(memory: np.ndarray, tensor: torch.Tensor) -> None:
    """Copy `tensor`, on any device, to `memory`, uint8[bytes]; on a CPU without an intermediate copy."""
    torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
