"""The dtypes of weight files: torch's, and their names in the safetensors format; the specs of tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from schemas.records import TensorSpec

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def tensor_specs(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """Names, dtypes and shapes of `tensors`. Raises ValueError for a dtype that weight files do not support."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}; supported are {', '.join(map(str, DTYPES))}")
    return [TensorSpec(name, DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
