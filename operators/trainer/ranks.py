"""The trainer's processes that hold one model together: FSDP2 (arXiv 2304.11277) over gloo on CPUs, nccl on GPUs.

Each rank trains sequences of its own and all take the same steps: whatever decides something (advantages, coefficients,
how many micro-batches) is made of what all ranks know. A process that is alone uses no process group at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process as rank `rank` of `count`; with more than one, of torch's default process group."""

    rank: int = 0
    count: int = 1

    def gather(self, values: Tensor) -> list[Tensor]:
        """Each rank's `values`, [any, …] and on the host, in the order of ranks."""
        if self.count == 1:
            return [values]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(lengths, torch.tensor([len(values)]))
        longest = max(map(int, lengths))
        padded = torch.cat([values, values.new_zeros(longest - len(values), *values.shape[1:])])
        found = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(found, padded.contiguous())
        return [each[: int(length)] for each, length in zip(found, lengths, strict=True)]

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sum over ranks of each of `numbers`, of which every rank gives as many."""
        if self.count == 1:
            return list(numbers)
        summed: list[float] = (
            torch.stack(self.gather(torch.tensor([numbers], dtype=torch.float64))).sum((0, 1)).tolist()
        )
        return summed

    def maximum(self, number: float) -> float:
        """The largest of all ranks' numbers."""
        return number if self.count == 1 else float(max(map(float, self.gather(torch.tensor([number]).double()))))

    def shard(self, module: nn.Module, layers: Sequence[nn.Module], device: torch.device) -> None:
        """Split the parameters of `module` over the ranks, each of `layers` gathered by itself when it is used.

        From then on `module` must be called as a whole. Gradients are the mean over ranks.
        """
        if self.count == 1:
            return
        mesh = init_device_mesh(device.type, (self.count,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)


ALONE = Ranks()


def full_tensor(tensor: Tensor) -> Tensor:
    """`tensor` with the parts that other ranks hold; all ranks must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of the whole `value`, which lies as `like` does; all ranks must ask."""
    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements) if isinstance(like, DTensor) else value
