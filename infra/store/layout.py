"""The position of each tensor in a weight file: the safetensors layout, which is the same for every version.

A file is 8 bytes of header length (little endian), the JSON header padded with spaces to a multiple of 8, then the
tensors without gaps (github.com/huggingface/safetensors, "Format"). The order is the library's own, widest dtype first,
then name: equal weights give the bytes that the library itself would write, and every tensor is aligned to its dtype.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod

import numpy as np

from schemas.records import TensorSpec

# In the order of the library, with bytes per element.
_DTYPES = {
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
    **dict.fromkeys(("F32", "U32", "I32"), 4),
    **dict.fromkeys(("BF16", "F16", "U16", "I16"), 2),
    **dict.fromkeys(("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_DTYPES)}


def tensor_bytes(spec: TensorSpec) -> int:
    """Bytes of the tensor. Raises ValueError for an unknown dtype or a negative dimension."""
    if spec.dtype not in _DTYPES:
        raise ValueError(f"tensor {spec.name!r} has unknown dtype {spec.dtype!r}, not one of {', '.join(_DTYPES)}")
    if min(spec.shape, default=0) < 0:
        raise ValueError(f"tensor {spec.name!r} has a negative dimension: shape {spec.shape}")
    return prod(spec.shape) * _DTYPES[spec.dtype]


class Layout:
    """The layout of a file with these tensors.

    `specs` are in file order, `size` is the whole file's bytes. Raises ValueError for an unknown dtype, a negative
    dimension, or a duplicate name.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        sizes = {spec.name: tensor_bytes(spec) for spec in specs}
        self.specs = tuple(sorted(specs, key=lambda spec: (_RANKS[spec.dtype], spec.name)))
        self._ranges: dict[str, tuple[int, int]] = {}
        end = 0
        for spec in self.specs:
            if spec.name in self._ranges:
                raise ValueError(f"tensor {spec.name!r} is listed twice")
            start, end = end, end + sizes[spec.name]
            self._ranges[spec.name] = (start, end)
        self.header = self._header()
        self.size = len(self.header) + end

    @property
    def names(self) -> frozenset[str]:
        """The tensors' names."""
        return frozenset(self._ranges)

    def places(self) -> dict[str, int]:
        """The first byte of each tensor in a file, by name."""
        return {name: len(self.header) + start for name, (start, _) in self._ranges.items()}

    def tensor_ranges(self) -> dict[str, tuple[int, int]]:
        """The first byte of each tensor in a file and the byte behind its last, by name."""
        first = len(self.header)
        return {name: (first + start, first + end) for name, (start, end) in self._ranges.items()}

    def tensor_views(self, file: memoryview) -> dict[str, np.ndarray]:
        """The bytes of each tensor in `file`, by name: uint8[bytes]. Raises ValueError for a file of another size."""
        if len(file) != self.size:
            raise ValueError(f"the file has {len(file)} bytes, the layout {self.size}")
        data = np.frombuffer(file, np.uint8)[len(self.header) :]
        return {name: data[start:end] for name, (start, end) in self._ranges.items()}

    def spans(self) -> list[tuple[int, int, int]]:
        """Start, end and bytes per element of the header and of every tensor, in file order, without gaps."""
        first = len(self.header)
        tensors = [
            (first + start, first + end, _DTYPES[spec.dtype])
            for spec in self.specs
            for start, end in (self._ranges[spec.name],)
        ]
        return [(0, first, 1), *tensors]

    def matches(self, file: memoryview) -> bool:
        """Whether `file` has this header and this size."""
        return len(file) == self.size and bytes(file[: len(self.header)]) == self.header

    def _header(self) -> bytes:
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for spec in self.specs:
            start, end = self._ranges[spec.name]
            entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (start, end)}
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text
