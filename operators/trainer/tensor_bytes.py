"""Tensors as the weight store takes them: specs in safetensors' words, and copies into its memory."""

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
    """What the tensors of every version look like. Raises ValueError for a dtype that weight files do not know."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}; known are {', '.join(map(str, _DTYPES))}")
    return [TensorSpec(name, _DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]


def copy_tensor(place: np.ndarray, tensor: torch.Tensor) -> None:
    """Copy `tensor`, wherever it lies, to `place`, uint8[bytes]. One copy, through no other memory on a CPU."""
    torch.from_numpy(place).view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
