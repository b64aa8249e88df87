"""The parts of ranks in the file of a version, and the note by which ranks of one machine find that file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from infra.store.layout import Layout
from operators.trainer import version_file, weight_parts
from operators.trainer.ranks import ALONE, Ranks
from operators.trainer.version_file import describe_file, gather_in_step, open_file, ranks_without_file, send_parts
from operators.trainer.weight_parts import NamedRange, WeightPart, groups_of, on_host, steps_of
from schemas.records import TensorSpec

LAYOUT = Layout([TensorSpec("a", "BF16", (4,)), TensorSpec("b", "BF16", (2,))])
RANGES = (NamedRange("a", 0, 4), NamedRange("b", 4, 2))


def part(begin: int, *elements: float) -> WeightPart:
    return WeightPart(RANGES, begin, torch.tensor(elements), torch.bfloat16)


def views_of_zeros() -> dict[str, np.ndarray]:
    return {"a": np.zeros(8, np.uint8), "b": np.zeros(4, np.uint8)}


def values(views: dict[str, np.ndarray], name: str) -> list[float]:
    return torch.from_numpy(views[name]).view(torch.bfloat16).tolist()


def test_parts_that_span_names_are_written_and_rounded() -> None:
    views = views_of_zeros()
    for each in (part(0, 1.0, 2.0, 3.0), part(3, 4.0, 1.00001), part(5, 6.0), part(6)):
        each.write(views)
    assert values(views, "a") == [1, 2, 3, 4]
    assert values(views, "b") == [1, 6]


def test_part_rejects_a_tensor_of_another_size() -> None:
    with pytest.raises(RuntimeError, match=r"'b' has 2 elements of torch.bfloat16, which are not 8 bytes"):
        part(0, 1.0).write(views_of_zeros() | {"b": np.zeros(8, np.uint8)})


def test_parts_are_written_in_groups() -> None:
    """Large ones are split, small ones written together."""
    parts = [part(0, 1.0, 2.0, 3.0), part(3, 4.0), part(6), part(4, 5.0), part(5, 6.0)]
    groups = list(groups_of(parts, most_bytes=4))
    assert [[len(each.elements) for each in group] for group in groups] == [[2], [1, 1, 0], [1, 1]]
    views = views_of_zeros()
    for group in groups:
        for each in on_host(group):
            each.write(views)
    assert (values(views, "a"), values(views, "b")) == ([1, 2, 3, 4], [5, 6])


def test_parts_of_different_dtypes_are_in_different_groups() -> None:
    other = WeightPart((NamedRange("c", 0, 1),), 0, torch.ones(1), torch.float32)
    assert [len(group) for group in groups_of([part(0, 1.0), other, other, part(1, 1.0)])] == [1, 2, 1]
    assert not list(groups_of([]))


def test_groups_of_a_gpu_are_rounded_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def arrive(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        return [each.as_subclass(torch.Tensor).to(dtype) for each in tensors]

    monkeypatch.setattr(weight_parts, "together_on_host", arrive)
    on_gpu = [replace(each, elements=each.elements.as_subclass(OnGpu)) for each in (part(0, 1.001), part(1, 2.0, 3.0))]
    (group,) = groups_of(on_gpu)
    views = views_of_zeros()
    for each in on_host(group):
        each.write(views)
    assert values(views, "a") == [1, 2, 3, 0]


def test_steps_have_as_many_parts_on_every_rank() -> None:
    """Whatever each rank has of a tensor: rank 0 receives the parts of a step from all."""
    large, small = (NamedRange("a", 0, 10),), (NamedRange("b", 0, 2),)
    for shares in ([(0, 3), (0, 1)], [(3, 7), (1, 1)], [(10, 0), (2, 0)]):
        parts = [
            WeightPart(ranges, begin, torch.arange(begin, begin + count).float(), dtype)
            for ranges, (begin, count), dtype in zip(
                (large, small, small, small),
                [*shares, *shares[1:] * 2],
                [torch.bfloat16] * 3 + [torch.float32],
                strict=True,
            )
        ]
        steps = list(steps_of(parts, most_bytes=8))
        assert [len(step) for step in steps] == [2, 2, 1, 1]
        assert all(part.begin + len(part.elements) <= part.total for step in steps for part in step)
        elements = [torch.cat([part.elements for step in steps for part in step if part.ranges == large])]
        assert torch.equal(elements[0], parts[0].elements)


def test_sent_parts_leave_a_gpu_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through pinned memory; a few messages have the parts of many tensors."""
    copied, sent = list[int](), list[torch.Tensor]()

    def arrive(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        copied.append(len(tensors))
        return [each.as_subclass(torch.Tensor).to(dtype) for each in tensors]

    monkeypatch.setattr(weight_parts, "together_on_host", arrive)
    monkeypatch.setattr(version_file.dist, "send", lambda tensor, *_: sent.append(tensor))
    parts = [replace(each, elements=each.elements.as_subclass(OnGpu)) for each in (part(0, 1.001), part(1, 2.0, 3.0))]
    list(send_parts(parts, Ranks(1, 2), None))  # type: ignore[arg-type]
    assert copied == [2]
    assert sent[0].tolist() == [[0, 1], [1, 2]]
    assert sent[1].view(torch.bfloat16).tolist() == [1, 2, 3]


def test_ranks_that_gather_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those that write nothing queue all tensors over NCCL, whose time-outs begin then."""

    class Together(Ranks):
        def maximum(self, number: float) -> float:
            done.append("together")
            return number

    done = list[str]()
    monkeypatch.setattr(version_file, "_TOGETHER_BYTES", 8)
    items = SimpleNamespace(items=lambda: iter([(name, torch.zeros(1)) for name in "abc"]))
    for name, _ in gather_in_step(items, Together(1, 2)):  # type: ignore[arg-type]
        done.append(name)
    assert done == ["a", "b", "together", "c"]


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of an arriving version, with its header."""
    path = tmp_path / "1.2.partial"
    path.write_bytes(LAYOUT.header + bytes(LAYOUT.size - len(LAYOUT.header)))
    return path


def test_parts_are_written_into_the_file_of_the_same_machine(file: Path) -> None:
    with open_file(describe_file(file), LAYOUT) as opened:
        assert opened is not None
        for each in (part(1, 2.0, 3.0, 4.0), part(4, 5.0, 6.0)):
            each.write_to_file(opened, LAYOUT.places())
    views = LAYOUT.tensor_views(memoryview(bytearray(file.read_bytes())))
    assert (values(views, "a"), values(views, "b")) == ([0, 2, 3, 4], [5, 6])


@pytest.mark.parametrize(
    "changed", [{"machine": "another"}, {"device": 1}, {"inode": 1}, {"path": "/nowhere/1.2.partial"}], ids=str
)
def test_file_of_another_machine_is_not_opened(file: Path, changed: dict[str, object]) -> None:
    note = json.dumps(json.loads(describe_file(file)) | changed)
    with open_file(note, LAYOUT) as opened:
        assert opened is None


@pytest.mark.parametrize("note", ["", "{}", "[]", "nothing", '{"path": 3, "machine": "", "device": 0, "inode": 0}'])
def test_note_that_describes_no_file_is_rejected(note: str) -> None:
    with pytest.raises(RuntimeError, match=r"note of a version's file is invalid"):
        open_file(note, LAYOUT).__enter__()


def test_note_of_a_file_outside_of_stores_is_rejected(file: Path) -> None:
    with pytest.raises(RuntimeError, match="is no file of a weight store"):
        open_file(describe_file(file.rename(file.with_name("passwords"))), LAYOUT).__enter__()


def test_file_with_other_tensors_is_rejected(file: Path) -> None:
    other = Layout([TensorSpec("a", "F32", (3,))])
    with pytest.raises(RuntimeError, match="publishes other tensors than this rank has"):
        open_file(describe_file(file), other).__enter__()


def test_rank_0_without_a_file_is_rejected() -> None:
    with pytest.raises(RuntimeError, match="rank 0 has no file"):
        ranks_without_file(ALONE, None)
