"""Tensors are read by ranges of elements, from one file or from the parts of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from infra.models import stored_tensors
from infra.models.stored_tensors import StoredTensors

TENSOR = torch.arange(30, dtype=torch.float32).view(10, 3)


def save_parts(folder: Path, *ends: int) -> list[Path]:
    """`TENSOR` flat in several files, which end at these elements."""
    files, begin = [], 0
    for end in ends:
        files.append(folder / f"{end}.safetensors")
        save_file({"a": TENSOR.flatten()[begin:end].clone()}, files[-1])
        begin = end
    return files


@pytest.mark.parametrize(("begin", "end"), [(0, 30), (0, 12), (11, 13), (12, 21), (5, 25), (29, 30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_tensors_read_a_range_across_files(tmp_path: Path, begin: int, end: int, dtype: torch.dtype) -> None:
    with StoredTensors(save_parts(tmp_path, 12, 21, 30), {"a": ("F32", (10, 3))}) as stored:
        into = torch.empty(end - begin, dtype=dtype)
        stored.read("a", begin, into)
        assert torch.equal(into, TENSOR.flatten()[begin:end].to(dtype))
        assert torch.equal(stored.tensor("a"), TENSOR)


def test_stored_tensors_of_a_gpu_arrive_through_pinned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[tuple[int, torch.dtype]] = []

    class OnGpu(torch.Tensor):
        is_cuda, is_cpu = True, False  # type: ignore[assignment]

    def copy(read: Callable[[memoryview], None], target: torch.Tensor, dtype: torch.dtype) -> None:
        pieces.append((len(target), dtype))
        source = torch.empty(len(target), dtype=dtype)
        read(source.view(torch.uint8).numpy().data)
        target.copy_(source)

    monkeypatch.setattr(stored_tensors, "read_part", copy)
    monkeypatch.setattr(stored_tensors, "_PIECE_BYTES", 32)
    with StoredTensors(save_parts(tmp_path, 12, 30)) as stored:
        into = torch.empty(20).as_subclass(OnGpu)
        stored.read("a", 5, into)
    assert torch.equal(into.as_subclass(torch.Tensor), TENSOR.flatten()[5:25])
    assert pieces == [(7, torch.float32), (8, torch.float32), (5, torch.float32)]


def test_stored_tensors_have_the_shapes_of_whole_tensors(tmp_path: Path) -> None:
    save_file({"a": TENSOR}, tmp_path / "a.safetensors")
    with StoredTensors([tmp_path / "a.safetensors"]) as stored:
        assert stored.shapes == {"a": (10, 3)}


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ({"a": ("F32", (11, 3))}, "'a' should have 33 elements of F32; the files have 30"),
        ({"a": ("BF16", (10, 3))}, "'a' should have 30 elements of BF16"),
        ({"a": ("F32", (10, 3)), "b": ("F32", (1,))}, "'b' should have 1 elements of F32; the files have 0"),
        ({}, "the files have tensors that the manifest lacks, such as 'a'"),
    ],
)
def test_stored_tensors_reject_parts_of_another_manifest(
    tmp_path: Path, manifest: dict[str, tuple[str, tuple[int, ...]]], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        StoredTensors(save_parts(tmp_path, 12, 30), manifest)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x08\0\0\0\0\0\0\0nonsense", b"\x02\0\0\0\0\0\0\0{}extra"[:9]])
def test_stored_tensors_reject_a_damaged_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.safetensors"):
        StoredTensors([file])
