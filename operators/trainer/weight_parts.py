"""A rank's part of the weights that are published, and its place in the file of a version."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from infra.models.device_copies import host_parts, together_on_host

GROUP_BYTES = 32 << 20
"""Bytes that are copied from a GPU at once."""


class NamedRange(NamedTuple):
    """The elements of a flattened tensor that are the tensor `name` of a checkpoint, such as one expert's."""

    name: str
    begin: int
    elements: int


@dataclass(frozen=True, slots=True, eq=False)
class WeightPart:
    """The elements, from `begin` on, of a flattened tensor of a model that a rank holds: `elements` [any].

    `ranges` are the names of the whole tensor's elements. They are rounded to `dtype` when they are written.
    """

    ranges: tuple[NamedRange, ...]
    begin: int
    elements: Tensor
    dtype: torch.dtype

    @property
    def total(self) -> int:
        """The number of elements of the whole tensor."""
        return sum(each.elements for each in self.ranges)

    def write(self, views: Mapping[str, np.ndarray]) -> None:
        """Write the elements to `views`, the bytes of each tensor of a file: uint8[bytes], by name.

        Raises RuntimeError for a view of another size.
        """
        for name, _, count in self.ranges:
            if views[name].nbytes != count * self.dtype.itemsize:
                raise RuntimeError(
                    f"tensor {name!r} has {count} elements of {self.dtype}, which are not {views[name].nbytes} bytes"
                )
        for name, begin, elements in self._slices():
            if elements.dtype == self.dtype and not elements.is_cuda:
                size = self.dtype.itemsize  # numpy's slices and copies keep Python's lock where they are short
                np.copyto(views[name][begin * size : (begin + len(elements)) * size], _bytes_of(elements))
                continue
            target = torch.from_numpy(views[name]).view(self.dtype)
            if not elements.is_cuda:
                target[begin : begin + len(elements)].copy_(elements)  # rounded without a copy in between
                continue
            for part in host_parts(elements, self.dtype):
                target[begin : begin + len(part)].copy_(part)
                begin += len(part)

    def write_to_file(self, file: int, places: Mapping[str, int]) -> None:
        """Write the elements to the open `file`, in which each tensor has its first byte at `places`. Raises OSError.

        Few of these elements are in memory twice, and no page of the file is mapped.
        """
        for name, begin, elements in self._slices():
            offset = places[name] + begin * self.dtype.itemsize
            for part in host_parts(elements, self.dtype):
                data = _bytes_of(part).data
                while data:
                    count = os.pwrite(file, data, offset)
                    data, offset = data[count:], offset + count

    def _slices(self) -> Iterator[tuple[str, int, Tensor]]:
        """The elements by tensor: its name, the first of them within it, and the elements."""
        end = self.begin + len(self.elements)
        for name, first, count in self.ranges:
            low, high = max(self.begin, first), min(end, first + count)
            if low < high:
                yield name, low - first, self.elements[low - self.begin : high - self.begin]


def groups_of(parts: Iterable[WeightPart], most_bytes: int = GROUP_BYTES) -> Iterator[list[WeightPart]]:
    """All elements of `parts`, in order, as parts in groups of one dtype that have at most `most_bytes` together."""
    group: list[WeightPart] = []
    size = 0
    for piece in (piece for part in parts for piece in _pieces(part, most_bytes)):
        bytes_of_piece = len(piece.elements) * piece.dtype.itemsize
        if group and (size + bytes_of_piece > most_bytes or piece.dtype != group[0].dtype):
            yield group
            group, size = [], 0
        group.append(piece)
        size += bytes_of_piece
    if group:
        yield group


def steps_of(parts: Iterable[WeightPart], most_bytes: int) -> Iterator[list[WeightPart]]:
    """All elements of `parts`, in order, as groups of one dtype, with as many parts on every rank: of tensors that have
    about `most_bytes` on all ranks together. Of a larger tensor each group has a share of this rank's elements.
    """
    group: list[WeightPart] = []
    size = 0
    for part in parts:
        bytes_of_all = part.total * part.dtype.itemsize
        count = max(1, -(-bytes_of_all // most_bytes))
        length = -(-len(part.elements) // count)
        for number in range(count):
            begin = min(number * length, len(part.elements))
            if group and (size >= most_bytes or part.dtype != group[0].dtype):
                yield group
                group, size = [], 0
            piece = part.elements[begin : begin + length]
            group.append(replace(part, begin=part.begin + begin, elements=piece))
            size += bytes_of_all // count
    if group:
        yield group


def on_host(group: Sequence[WeightPart]) -> list[WeightPart]:
    """The parts of a group of `groups_of` in host memory, rounded; those that are there already as they are."""
    if not group[0].elements.is_cuda:
        return list(group)
    copies = together_on_host([part.elements for part in group], group[0].dtype)
    return [replace(part, elements=copy) for part, copy in zip(group, copies, strict=True)]


def _pieces(part: WeightPart, most_bytes: int) -> Iterator[WeightPart]:
    begin = part.begin
    for elements in part.elements.split(max(1, most_bytes // part.dtype.itemsize)):
        yield replace(part, begin=begin, elements=elements)
        begin += len(elements)


def _bytes_of(elements: Tensor) -> np.ndarray:
    return elements.view(torch.uint8).numpy()
