"""The part of a tensor that this process holds: of a sharded tensor (a DTensor) a contiguous range of its elements."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


class LocalPart(NamedTuple):
    """The elements of a flattened tensor from `begin` on that a process holds, as a view of its memory."""

    begin: int
    elements: Tensor

    @property
    def end(self) -> int:
        return self.begin + len(self.elements)


def local_part(tensor: Tensor) -> LocalPart:
    """This process's part of `tensor`: all of a plain one. Raises ValueError for a part that is not contiguous."""
    if not isinstance(tensor, DTensor):
        return LocalPart(0, _flat(tensor.detach()))
    begin, shape = 0, tensor.shape
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            if placement.dim:
                raise ValueError(f"a tensor of shape {list(shape)} is sharded as {tensor.placements}, not by rows")
            mesh = tensor.device_mesh
            rows = -(-shape[0] // mesh.size(dimension))  # FSDP's shards are those of torch.chunk
            begin = min(shape[0], rows * mesh.get_local_rank(dimension)) * prod(shape[1:])
    return LocalPart(begin, _flat(tensor.to_local().detach()))


def _flat(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {list(tensor.shape)} is not contiguous (strides {tensor.stride()})")
    return tensor.view(-1)
