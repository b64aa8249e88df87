"""Safetensors files read as they lie on a disk: which tensors, and where their bytes are. No vendor, no copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infra.store.layout import tensor_bytes
from infra.store.weight_store import open_mapped
from schemas.records import TensorSpec

MAX_HEADER = 100_000_000
_METADATA = "__metadata__"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class TensorPlace(NamedTuple):
    """A tensor of a file, at bytes `start` to `end` of it."""

    spec: TensorSpec
    start: int
    end: int


def tensor_places(data: memoryview) -> dict[str, TensorPlace]:
    """The tensors of a safetensors file by name, of which nothing but the header is looked at.

    Raises ValueError for what is no such file.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > min(MAX_HEADER, len(data) - 8):
            raise ValueError(f"a header of {length} bytes in a file of {len(data)}")
        header = json.loads(bytes(data[8 : 8 + length]))
        return {name: _placed(name, entry, 8 + length, data) for name, entry in header.items() if name != _METADATA}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a safetensors file: {error}") from error


def _placed(name: str, entry: Any, first: int, data: memoryview) -> TensorPlace:
    spec = TensorSpec(name, entry["dtype"], tuple(entry["shape"]))
    start, end = entry["data_offsets"]
    if not all(type(number) is int for number in (start, end, *spec.shape)):
        raise ValueError(f"tensor {name!r} has shape {spec.shape} and lies at {start!r} to {end!r}")
    if not 0 <= start <= end <= len(data) - first:
        raise ValueError(f"tensor {name!r} lies at {start} to {end} of {len(data) - first} bytes")
    if end - start != tensor_bytes(spec):
        raise ValueError(f"tensor {name!r} has {tensor_bytes(spec)} bytes and lies at {start} to {end}")
    return TensorPlace(spec, first + start, first + end)


def tensors_in(data: memoryview) -> dict[str, tuple[TensorSpec, np.ndarray]]:
    """The tensors of a safetensors file by name: what they are, and their bytes in place, uint8[bytes].

    Raises ValueError for what is no such file.
    """
    memory = np.frombuffer(data, np.uint8)
    return {name: (spec, memory[start:end]) for name, (spec, start, end) in tensor_places(data).items()}


def weight_paths(folder: Path) -> list[Path]:
    """The weight files of a Hugging Face folder. Raises FileNotFoundError, ValueError for an index that is none."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}")
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX} is no index: {error!r}") from error
    if any(Path(name).name != name for name in names):
        raise ValueError(f"{folder / INDEX} points out of its folder")
    return [folder / name for name in names]


def folder_tensors(folder: Path) -> dict[str, tuple[TensorSpec, np.ndarray]]:
    """The tensors of a Hugging Face folder, mapped as long as any of them is held. Raises as the two above."""
    found: dict[str, tuple[TensorSpec, np.ndarray]] = {}
    for path in weight_paths(folder):
        try:
            found |= tensors_in(open_mapped(path))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return found
