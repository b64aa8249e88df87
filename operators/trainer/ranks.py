"""The trainer's ranks, which shard one model: FSDP2 (arXiv 2304.11277) over gloo on CPUs, nccl on GPUs.

Each rank trains its own sequences, and all take the same optimizer steps: advantages, coefficients and the number of
micro-batches are computed from metadata that all ranks have. A single rank uses no process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from operators.trainer.config import Precision
from operators.trainer.training_config import TrainingConfig

COLLECTIVE_TIMEOUT_S = 600.0
"""Default timeout of a collective. A process that exits is detected at once; this detects one that hangs."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process as rank `rank` of `count`. More than one rank use torch's default process group.

    `shards` consecutive ranks hold one copy of a model between them (0: all ranks hold one); the others hold further
    copies, whose gradients are summed (hybrid sharding). `context` consecutive ranks train the same sequences
    (`context_parallel.py`). Each of these ranks is `stride` processes, which call with the same values. A collective
    of any of them fails after `timeout_s`.
    """

    rank: int = 0
    count: int = 1
    shards: int = 0
    context: int = 1
    stride: int = 1
    timeout_s: float = COLLECTIVE_TIMEOUT_S

    @staticmethod
    def of(config: TrainingConfig, rank: int) -> Ranks:
        """This process as rank `rank` of `config`."""
        return Ranks(
            rank, config.ranks, config.shard_ranks, config.context_ranks, timeout_s=config.collective_timeout_s
        )

    @property
    def of_first_copy(self) -> bool:
        """Whether this rank's shards are of the first copy: every tensor is on these ranks once."""
        return not self.shards or self.rank < self.shards

    def of_data(self) -> Ranks:
        """The ranks that have different sequences: each is a context group."""
        rank, count = self.rank // self.context, self.count // self.context
        return Ranks(rank, count, stride=self.context, timeout_s=self.timeout_s)

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

    def open_group(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """The one of `groups` that has this rank. A collective: every rank must call it with the same groups."""
        timeout = timedelta(seconds=self.timeout_s)  # by default a new group has the backend's, not that of all ranks
        opened = [dist.new_group(list(ranks), timeout=timeout) for ranks in groups]
        own = next(group for group, ranks in zip(opened, groups, strict=True) if self.rank in ranks)
        assert isinstance(own, dist.ProcessGroup)
        return own

    def open_mesh(self, device: torch.device) -> DeviceMesh | None:
        """The ranks that hold models on `device`, as FSDP2 needs them: [shards] or [copies, shards]; None for a single
        rank. A collective: every rank must call it.
        """
        if self.count == 1:
            return None
        if self.shards in (0, self.count):
            return init_device_mesh(device.type, (self.count,))  # torch's default group
        ranks = torch.arange(self.count).view(-1, self.shards)
        groups = [self.open_group(each.tolist()) for each in (ranks.T, ranks)]
        return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=("copies", "shards"))


ALONE = Ranks()


def shard(
    module: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh | None,
    precision: Precision = "float32",
    keep_gathered: bool = False,
) -> None:
    """Shard the parameters of `module` over the ranks of `mesh`; each of `layers` is gathered separately when it is
    used, and released after its use or, with `keep_gathered`, by `release_gathered`. Without a mesh nothing changes.

    Afterwards `module` must be called as one module. Gradients are the mean over ranks. With bfloat16 parameters are
    gathered and used in bfloat16; the shards, which the optimizer updates, and sums of gradients are float32.
    """
    if mesh is None:
        return
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bfloat16" else None, reduce_dtype=torch.float32
    )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_gathered)
    # Without it the outermost group, with the embedding, stays whole after a forward pass without a backward pass.
    outermost = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_gathered)
    outermost.set_reshard_after_backward(not keep_gathered)


def release_gathered(module: nn.Module) -> None:
    """Release the gathered parameters of `module`, of which this rank keeps its shards: call it before they change, and
    before another model is used."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """`tensor` with the shards of all ranks. A collective: every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
