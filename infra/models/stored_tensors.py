"""Tensors in safetensors files, read by ranges of their elements: a process reads only what it will hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from infra.models.device_copies import read_part
from infra.models.dtypes import TORCH_DTYPES
from infra.storage import RangeReader, StorageFolder
from infra.store.weight_files import TensorPlace, header_length, places_in_header, weight_paths

_PIECE_BYTES = 16 << 20
"""Bytes that are read at once where they must be converted or copied to a device."""


class _Range(NamedTuple):
    """Elements `begin` to `end` of a flattened tensor, in `file` from byte `start` on."""

    file: int
    start: int
    begin: int
    end: int


class StoredTensors:
    """The tensors of safetensors files, during its `with` block. `shapes` has the full shape of each by name.

    `shards`: each file holds flat parts of tensors, in the order of the files, which together are the tensors of these
    dtypes and shapes (see `operators/trainer/checkpoint_files.py`); None: each tensor is whole in one file.

    Raises OSError, and ValueError for a file that is not a safetensors file or parts that do not make the tensors.
    """

    def __init__(
        self, files: Sequence[StorageFolder], shards: Mapping[str, tuple[str, tuple[int, ...]]] | None = None
    ) -> None:
        self._files = [RangeReader(file) for file in files]
        self._closing = ExitStack()
        self._ranges: dict[str, list[_Range]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for number, (reader, file) in enumerate(zip(self._files, files, strict=True)):
            for name, place in _read_places(reader, file).items():
                self._add(number, name, place, file)
        if shards is not None:
            self._check_shards(shards)

    def __enter__(self) -> StoredTensors:
        for reader in self._files:
            self._closing.enter_context(reader)
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def read(self, name: str, begin: int, into: Tensor) -> None:
        """Fill `into`, [n] contiguous, with the n elements of the flattened tensor `name` from `begin` on.

        Values are converted to the dtype of `into`. On a GPU the copy is under way when this returns.
        """
        end = begin + len(into)
        for each in self._ranges[name]:
            first, last = max(begin, each.begin), min(end, each.end)
            if first < last:
                self._read_range(each, first, self._dtypes[name], into[first - begin : last - begin])

    def tensor(self, name: str) -> Tensor:
        """The whole tensor `name`."""
        flat = torch.empty(prod(self.shapes[name]), dtype=self._dtypes[name])
        self.read(name, 0, flat)
        return flat.view(self.shapes[name])

    def _read_range(self, each: _Range, first: int, dtype: torch.dtype, into: Tensor) -> None:
        reader, start = self._files[each.file], each.start + (first - each.begin) * dtype.itemsize
        if into.is_cpu and into.dtype == dtype:
            reader.read_into(start, _bytes(into))
            return
        for piece in into.split(_PIECE_BYTES // dtype.itemsize):
            if into.is_cuda:
                read_part(partial(reader.read_into, start), piece, dtype)
            else:
                buffer = torch.empty(len(piece), dtype=dtype)
                reader.read_into(start, _bytes(buffer))
                piece.copy_(buffer)
            start += len(piece) * dtype.itemsize

    def _add(self, number: int, name: str, place: TensorPlace, file: StorageFolder) -> None:
        spec = place.spec
        if spec.dtype not in TORCH_DTYPES:
            raise ValueError(f"tensor {name!r} in {file} has dtype {spec.dtype}, which is not supported")
        ranges = self._ranges.setdefault(name, [])
        begin = ranges[-1].end if ranges else 0
        ranges.append(_Range(number, place.start, begin, begin + prod(spec.shape)))
        self._dtypes[name], self.shapes[name] = TORCH_DTYPES[spec.dtype], spec.shape

    def _check_shards(self, shards: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        for name, (dtype, shape) in shards.items():
            found = self._ranges[name][-1].end if name in self._ranges else 0
            if found != prod(shape) or self._dtypes.get(name) != TORCH_DTYPES.get(dtype):
                raise ValueError(
                    f"tensor {name!r} should have {prod(shape)} elements of {dtype}; the files have {found}"
                )
            self.shapes[name] = shape
        if strange := self._ranges.keys() - shards.keys():
            raise ValueError(f"the files have tensors that the manifest lacks, such as {min(strange)!r}")


def model_tensors(folder: Path) -> StoredTensors:
    """The tensors of the Hugging Face folder `folder`. Raises FileNotFoundError, ValueError."""
    return StoredTensors(weight_paths(folder))


def _read_places(reader: RangeReader, file: StorageFolder) -> Mapping[str, TensorPlace]:
    try:
        with reader:
            first = bytearray(8)
            reader.read_into(0, memoryview(first))
            header = bytearray(header_length(bytes(first), reader.size))
            reader.read_into(8, memoryview(header))
        return places_in_header(bytes(header), reader.size)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _bytes(tensor: Tensor) -> memoryview:
    memory: memoryview = tensor.view(torch.uint8).numpy().data
    return memory
