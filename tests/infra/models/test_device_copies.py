"""Copies between a GPU and the host, checked without a GPU: tensors that say that they are on one, or fake ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from infra.models import device_copies
from infra.models.device_copies import (
    host_parts,
    move_module,
    moved,
    on_device,
    read_part,
    together_on_host,
    use_device,
)

GPU = torch.device("cuda:3")


class OnGpu(Tensor):
    """A tensor in host memory that says that it is on `GPU`."""

    is_cuda = True  # type: ignore[assignment]
    device = GPU  # type: ignore[assignment]


class Driver:
    """Replaces CUDA's events and pinned memory, and records on which stream each event is."""

    def __init__(self) -> None:
        self.recorded: list[str] = []
        self.waited = 0
        self.pinned: list[tuple[int, ...]] = []
        self._empty, self._empty_like = torch.empty, torch.empty_like

    def current_stream(self, device: torch.device | None = None) -> str:
        return f"stream of {device or 'the current device'}"

    def event(self) -> SimpleNamespace:
        return SimpleNamespace(record=self._record, synchronize=self._wait)

    def empty(self, *shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            self.pinned.append(shape)
        return self._empty(*shape, **options)

    def empty_like(self, like: Tensor, *, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            self.pinned.append(tuple(like.shape))
        return self._empty_like(like, **options)

    def _record(self, stream: str = "stream of the current device") -> None:
        self.recorded.append(stream)

    def _wait(self) -> None:
        self.waited += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    with torch.device("cpu"):  # torch lists its constructors once, and would list the replaced ones for all tests
        torch.empty(0)
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "current_stream", found.current_stream)
    monkeypatch.setattr(torch, "empty", found.empty)
    monkeypatch.setattr(torch, "empty_like", found.empty_like)
    return found


def test_host_parts_wait_on_the_device_of_the_tensor(driver: Driver) -> None:
    values = torch.arange(10.0).view(2, 5)
    parts = [part.clone() for part in host_parts(values.as_subclass(OnGpu), torch.bfloat16, part_bytes=6)]
    assert [len(part) for part in parts] == [3, 3, 3, 1]
    assert torch.equal(torch.cat(parts), values.flatten().bfloat16())
    assert driver.pinned == [(3,), (3,)]
    assert (driver.recorded, driver.waited) == ([f"stream of {GPU}"] * 4, 4)


def test_host_parts_of_the_host_are_not_pinned(driver: Driver) -> None:
    values = torch.arange(5.0)
    assert torch.equal(torch.cat(list(host_parts(values, part_bytes=8))), values)
    assert not driver.pinned
    assert not driver.recorded


def test_tensors_arrive_together_in_one_buffer(driver: Driver) -> None:
    values = [torch.arange(3.0) + 0.001, torch.empty(0), torch.arange(4.0)]
    found = together_on_host([each.as_subclass(OnGpu) for each in values], torch.bfloat16)
    assert [each.dtype for each in found] == [torch.bfloat16] * 3
    assert all(torch.equal(*pair) for pair in zip(found, [each.bfloat16() for each in values], strict=True))
    assert driver.pinned == [(7,)]
    assert (driver.recorded, driver.waited) == ([f"stream of {GPU}"], 1)


def test_read_part_fills_a_tensor_of_another_dtype(driver: Driver) -> None:
    target, stored = torch.zeros(4), torch.arange(4, dtype=torch.bfloat16)

    def read(into: memoryview) -> None:
        into[:] = stored.view(torch.uint8).numpy().data

    read_part(read, target, torch.bfloat16)
    assert driver.pinned == [(4,)]
    assert torch.equal(target, stored.float())


def test_moved_arrives_in_pinned_memory_from_a_gpu(driver: Driver) -> None:
    values = torch.arange(6.0).view(2, 3)
    there = moved(values.as_subclass(OnGpu), torch.device("cpu"))
    assert driver.pinned == [(2, 3)]
    assert torch.equal(there.as_subclass(Tensor), values)


def test_moved_part_of_a_sharded_tensor_is_pinned(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.arange(6.0).view(3, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        monkeypatch.setattr(DTensor, "is_cuda", True)
        there = moved(sharded, torch.device("cpu"))
        assert driver.pinned == [(3, 2)]
        assert isinstance(there, DTensor)
        assert there.placements == sharded.placements
        assert torch.equal(there.to_local(), sharded.to_local())
    finally:
        dist.destroy_process_group()


def test_move_module_waits_for_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr(device_copies, "moved", lambda tensor, _: tensor.clone().as_subclass(OnGpu))
    module = nn.Module()
    module.register_buffer("one", torch.ones(2))
    module.register_buffer("two", torch.ones(3))
    move_module(module, GPU)
    assert waits == [GPU] * 2
    assert all(isinstance(buffer, OnGpu) for buffer in module.buffers())


def test_use_device_is_for_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    selected: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    use_device("cpu")
    assert not selected
    for device in ("cuda", GPU):
        use_device(device)
    assert selected == [0, 3]


def test_on_device_copies_values_to_the_device() -> None:
    assert on_device(torch.arange(3).numpy(), torch.device("cpu")).tolist() == [0, 1, 2]
    with FakeTensorMode():  # to a GPU nothing has to be pinned first
        assert moved(torch.zeros(2), torch.device("cuda:0")).device == torch.device("cuda:0")
