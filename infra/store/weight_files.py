"""Reads the tensors of safetensors files in place, without the safetensors library and without copies."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from infra.store.layout import tensor_bytes
from infra.store.weight_store import open_mapped
from schemas.records import TensorSpec

MAX_HEADER = 100_000_000
_METADATA = "__metadata__"
_SAMPLE_BYTES = 4096
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class TensorPlace(NamedTuple):
    """A tensor of a file, at its bytes `start` to `end`."""

    spec: TensorSpec
    start: int
    end: int


def tensor_places(data: memoryview) -> dict[str, TensorPlace]:
    """The tensors of a safetensors file by name, from its header alone.

    Raises ValueError if it is not a safetensors file.
    """
    length = header_length(bytes(data[:8]), len(data))  # a view would outlive its mapping in an error
    return places_in_header(bytes(data[8 : 8 + length]), len(data))


def header_length(first: bytes, size: int) -> int:
    """The length of the header of a safetensors file of `size` bytes, which begins with `first`, 8 bytes.

    Raises ValueError if it is not a safetensors file.
    """
    length = int.from_bytes(first, "little")
    if size < 8 or length > min(MAX_HEADER, size - 8):
        raise ValueError(f"not a safetensors file: its header has {length} bytes, the file {size}")
    return length


def places_in_header(header: bytes, size: int) -> dict[str, TensorPlace]:
    """The tensors of a safetensors file of `size` bytes by name. Raises ValueError for an invalid header."""
    try:
        first = 8 + len(header)
        return {
            name: _tensor_place(name, entry, first, size - first)
            for name, entry in json.loads(header).items()
            if name != _METADATA
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a safetensors file: {error}") from error


def _tensor_place(name: str, entry: Any, first: int, size: int) -> TensorPlace:
    spec = TensorSpec(name, entry["dtype"], tuple(entry["shape"]))
    start, end = entry["data_offsets"]
    if not all(type(number) is int for number in (start, end, *spec.shape)):
        raise ValueError(f"tensor {name!r} has shape {spec.shape} at bytes {start!r} to {end!r}: all must be integers")
    if not 0 <= start <= end <= size:
        raise ValueError(f"tensor {name!r} is at bytes {start} to {end} of {size}")
    if end - start != tensor_bytes(spec):
        raise ValueError(f"tensor {name!r} has {tensor_bytes(spec)} bytes but is at bytes {start} to {end}")
    return TensorPlace(spec, first + start, first + end)


def tensors_in(data: memoryview) -> dict[str, tuple[TensorSpec, np.ndarray]]:
    """The tensors of a safetensors file by name: their specs, and views of their bytes, uint8[bytes].

    Raises ValueError if it is not a safetensors file.
    """
    memory = np.frombuffer(data, np.uint8)
    return {name: (spec, memory[start:end]) for name, (spec, start, end) in tensor_places(data).items()}


def weight_paths(folder: Path) -> list[Path]:
    """The weight files of a Hugging Face folder. Raises FileNotFoundError, ValueError for an invalid index."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}")
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        outside = any(Path(name).name != name or name in ("", "..") for name in names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / INDEX} is not a valid index: {error!r}") from error
    if outside:
        raise ValueError(f"{folder / INDEX} names files outside of its folder")
    return [folder / name for name in names]


def folder_tensors(folder: Path) -> dict[str, tuple[TensorSpec, np.ndarray]]:
    """The tensors of a Hugging Face folder, mapped while any is referenced. Raises as the two functions above."""
    found: dict[str, tuple[TensorSpec, np.ndarray]] = {}
    for path in weight_paths(folder):
        try:
            found |= tensors_in(open_mapped(path))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return found


def model_fingerprint(folder: Path) -> str:
    """The BLAKE3 (hex) of the config in `folder`, and of the names, dtypes and shapes of its tensors.

    Raises FileNotFoundError if the config or a weight file is missing, ValueError for an invalid one.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    digest = blake3(json.dumps(config, sort_keys=True).encode())
    for name, (spec, _) in sorted(folder_tensors(folder).items()):
        digest.update(f"\0{name} {spec.dtype} {list(spec.shape)}".encode())
    return digest.hexdigest()


def weights_sample(folder: Path) -> str:
    """The BLAKE3 (hex) of the first and the last 4 KiB of each tensor in `folder`, in which other weights differ.

    Little else is read: a mapped page would bring its neighbours. Raises as `folder_tensors`.
    """
    found: dict[str, bytes] = {}
    for path in weight_paths(folder):
        with path.open("rb", buffering=0) as file:
            size, number = os.fstat(file.fileno()).st_size, file.fileno()
            try:
                header = os.pread(number, header_length(os.pread(number, 8, 0), size), 8)
                places = places_in_header(header, size)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            for name, (_, start, end) in places.items():
                length = min(_SAMPLE_BYTES, end - start)
                found[name] = os.pread(number, length, start) + os.pread(number, length, end - length)
    digest = blake3()
    for name, sample in sorted(found.items()):
        digest.update(f"\0{name} ".encode() + sample)
    return digest.hexdigest()
