"""Copies of tensors into the memory of a weight store."""

from __future__ import annotations

import numpy as np
import torch


def copy_tensor(memory: np.ndarray, tensor: torch.Tensor) -> None:
    """Copy `tensor`, on any device, to `memory`, uint8[bytes]; on a CPU without an intermediate copy."""
    torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
