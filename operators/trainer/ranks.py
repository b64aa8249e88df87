"""The trainer's ranks, which shard one model: FSDP2 (arXiv 2304.11277) over gloo on CPUs, nccl on GPUs.

Each rank trains its own sequences, and all take the same optimizer steps: advantages, coefficients and the number of
micro-batches are computed from metadata that all ranks have. A single rank uses no process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from operators.trainer.config import Precision


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process as rank `rank` of `count`. More than one rank use torch's default process group.

    `shards` consecutive ranks hold one copy of a model between them (0: all ranks hold one); the others hold further
    copies, whose gradients are summed (hybrid sharding). `context` consecutive ranks train the same sequences
    (`context_parallel.py`). Each of these ranks is `stride` processes, which call with the same values.
    """

    rank: int = 0
    count: int = 1
    shards: int = 0
    context: int = 1
    stride: int = 1

    @property
    def of_first_copy(self) -> bool:
        """Whether this rank's shards are of the first copy: every tensor is on these ranks once."""
        return not self.shards or self.rank < self.shards

    def of_data(self) -> Ranks:
        """The ranks that have different sequences: each is a context group."""
        return Ranks(self.rank // self.context, self.count // self.context, stride=self.context)

    def gather(self, values: Tensor) -> list[Tensor]:
        """Gather each rank's `values`, [any, …] on the host, in rank order."""
        if self.count == 1:
            return [values]
        processes = self.count * self.stride
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(processes)]
        dist.all_gather(lengths, torch.tensor([len(values)]))
        longest = max(map(int, lengths))
        padded = torch.cat([values, values.new_zeros(longest - len(values), *values.shape[1:])])
        gathered = [torch.empty_like(padded) for _ in range(processes)]
        dist.all_gather(gathered, padded.contiguous())
        return [each[: int(length)] for each, length in zip(gathered, lengths, strict=True)][:: self.stride]

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Sum each of `numbers` over ranks; every rank passes the same count."""
        if self.count == 1:
            return list(numbers)
        summed: list[float] = (
            torch.stack(self.gather(torch.tensor([numbers], dtype=torch.float64))).sum((0, 1)).tolist()
        )
        return summed

    def maximum(self, number: float) -> float:
        """The largest `number` of all ranks."""
        return number if self.count == 1 else float(max(map(float, self.gather(torch.tensor([number]).double()))))

    def shard(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        device: torch.device,
        precision: Precision = "float32",
        keep_gathered: bool = False,
    ) -> None:
        """Shard the parameters of `module` over the ranks; each of `layers` is gathered separately when it is used,
        and released after its use or, with `keep_gathered`, by `release_gathered`.

        Afterwards `module` must be called as one module. Gradients are the mean over ranks. With bfloat16 parameters
        are gathered and used in bfloat16; the shards, which the optimizer updates, and sums of gradients are float32.
        """
        if self.count == 1:
            return
        if self.shards in (0, self.count):
            mesh = init_device_mesh(device.type, (self.count,))
        else:
            mesh = init_device_mesh(
                device.type, (self.count // self.shards, self.shards), mesh_dim_names=("copies", "shards")
            )
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if precision == "bfloat16" else None, reduce_dtype=torch.float32
        )
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_gathered)
        # Without it the outermost group, with the embedding, stays whole after a forward pass without a backward pass.
        outermost = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_gathered)
        outermost.set_reshard_after_backward(not keep_gathered)


ALONE = Ranks()


def release_gathered(module: nn.Module) -> None:
    """Release the gathered parameters of `module`, of which this rank keeps its shards: call it before they change."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """`tensor` with the shards of all ranks. A collective: every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
