"""Copies between a GPU and files, through pinned memory.

Between a GPU and ordinary memory the driver copies page by page (on an H200 0.7 to 7 GB/s), between it and pinned
memory at the speed of the bus (55 GB/s), and while the host does something else. torch keeps pinned memory for reuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

PART_BYTES = 4 << 20
"""Bytes of a part: few enough that the first one arrives early, enough that a part's own cost does not count."""


def use_device(device: torch.device | str) -> None:
    """Make `device`, if it is a GPU, the current one of this thread: FSDP, NCCL and all that names no device use it.

    Each thread has its own, GPU 0 at first.
    """
    chosen = torch.device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen.index or 0)


def use_own_stream(device: torch.device) -> None:
    """`use_device`, with a stream of this thread's own: its copies do not wait for other threads' kernels."""
    use_device(device)
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())


def synchronize(*devices: torch.device) -> None:
    """Wait for all that was begun on those of `devices` that are GPUs."""
    for device in {each for each in devices if each.type == "cuda"}:
        torch.cuda.synchronize(device)


def on_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """`values` on `device`. On a GPU the copy is under way when this returns: nothing waits for earlier work there."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return tensor.to(device) if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def host_parts(tensor: Tensor, dtype: torch.dtype | None = None, part_bytes: int = PART_BYTES) -> Iterator[Tensor]:
    """The elements of `tensor` in order, rounded to `dtype` if given, in parts [any] in host memory.

    Each part is valid until the next one is taken; while it is used, the next one arrives.
    """
    flat, dtype = tensor.detach().flatten(), dtype or tensor.dtype
    parts = flat.split(max(1, part_bytes // dtype.itemsize))
    if not flat.is_cuda:
        yield from (part.to(dtype) for part in parts)
        return
    buffers = [torch.empty(len(parts[0]), dtype=dtype, pin_memory=True) for _ in parts[:2]]
    arriving: tuple[Tensor, torch.cuda.Event] | None = None
    for number, part in enumerate(parts):
        target = buffers[number % 2][: len(part)]
        target.copy_(part.to(dtype), non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(flat.device))  # the thread's current device may be another one
        if arriving is not None:
            arriving[1].synchronize()
            yield arriving[0]
        arriving = target, arrived
    if arriving is not None:
        arriving[1].synchronize()
        yield arriving[0]


def together_on_host(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The elements of each of `tensors`, [any] on one GPU, rounded to `dtype`, in pinned memory.

    A few calls for all of them: around each call Python's lock changes hands, for which a thread that launches kernels
    waits.
    """
    buffer = torch.empty(sum(map(len, tensors)), dtype=dtype, pin_memory=True)
    copies = list(buffer.split([len(each) for each in tensors]))
    torch._foreach_copy_(copies, [each.detach() for each in tensors], non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(tensors[0].device))
    arrived.synchronize()
    return copies


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`, in pinned memory if it comes from a GPU to the host; of a sharded one this rank's part. The
    copy is under way when this returns: `synchronize` waits for it.
    """
    if device.type != "cpu" or not tensor.is_cuda:
        return tensor.to(device, non_blocking=device.type != "cpu")
    return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor, non_blocking=True)


def move_module(module: nn.Module, device: torch.device) -> None:
    """`module.to(device)`, through pinned memory."""

    def move(tensor: Tensor) -> Tensor:
        there = moved(tensor, device)
        synchronize(tensor.device, there.device)  # FSDP may copy it on the host next
        return there

    module._apply(move)


def read_part(read: Callable[[memoryview], None], target: Tensor, dtype: torch.dtype) -> None:
    """Fill `target` [any] on a GPU with the elements, of `dtype`, whose bytes `read` writes into host memory.

    The copy is under way when this returns.
    """
    source = torch.empty(target.numel(), dtype=dtype, pin_memory=True)
    read(source.view(torch.uint8).numpy().data)
    arriving = source.view(target.shape)
    if dtype != target.dtype:
        arriving = arriving.to(target.device, non_blocking=True)  # rounded there
    target.copy_(arriving, non_blocking=True)
