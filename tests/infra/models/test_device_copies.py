"""Copies between a GPU and the host, checked without a GPU: tensors that say that they are on one, or fake ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from infra.models.device_copies import host_parts, moved, on_device, read_part

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
        return self._empty_like(like.as_subclass(Tensor), **options)

    def _record(self, stream: str = "stream of the current device") -> None:
        self.recorded.append(stream)

    def _wait(self) -> None:
        self.waited += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
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
    assert not driver.pinned and not driver.recorded


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
    assert type(there) is Tensor and torch.equal(there, values)


def test_on_device_copies_values_to_the_device() -> None:
    assert on_device(torch.arange(3).numpy(), torch.device("cpu")).tolist() == [0, 1, 2]
    with FakeTensorMode():
        assert moved(torch.zeros(2), torch.device("cuda:0")).device == torch.device("cuda:0")
