"""A model's weights as one safetensors file: what the trainer publishes, relays carry and rollouts load.

The layout is the model's own: every parameter and persistent buffer once, under the first name it has in module
order. A tensor that is tied to another has no entry of its own, so a file never holds it twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


_PART = 32 << 20
"""Bytes that one thread reads at once."""
_READERS = min(4, os.cpu_count() or 1)


def weight_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The distinct tensors of `model` by name, in module order: the model's own memory, detached."""
    return {names[0]: tensor for names, tensor in _named_tensors(model)}


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """BLAKE3 over names, dtypes, shapes and bytes of `tensors`, in their order: equal for equal weights alone."""
    digest = blake3()
    for name, tensor in tensors.items():
        digest.update(f"{name} {_DTYPES[tensor.dtype]} {list(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_weights(model: PreTrainedModel, path: Path) -> None:
    """Write the weights of `model` to `path`, whole or not at all; equal weights give equal bytes."""
    tensors = {name: tensor.contiguous() for name, tensor in weight_tensors(model).items()}
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.replace(path)


def load_weights(model: PreTrainedModel, path: Path) -> None:
    """Copy the weights in the safetensors file `path` into `model`, in place.

    Raises FileNotFoundError if there is no such file, ValueError if it is no safetensors file or its names, shapes or
    dtypes do not fit; all is checked first, so that `model` is then unchanged.
    """
    with _fitting(model, path) as (file, places):
        read = {name: tensor for name, tensor in places.items() if tensor.is_cpu and tensor.is_contiguous()}
        read_tensors(path, read)
        with torch.no_grad():
            for name in places.keys() - read.keys():
                places[name].copy_(file.get_tensor(name))


def check_weights(model: PreTrainedModel, path: Path) -> None:
    """Raise what `load_weights` would, and load nothing: `model` may be on the meta device."""
    with _fitting(model, path):
        pass


def read_tensors(path: Path, places: Mapping[str, torch.Tensor]) -> None:
    """Read tensors of the safetensors file `path` into the memory of `places`, contiguous and of their dtypes.

    Reading takes half the time of mapping: the pages of a file that is new each time need not be mapped one by one.
    """
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(_READERS) as readers:
        length = int.from_bytes(file.read(8), "little")
        header, first = json.loads(file.read(length)), 8 + length
        parts = []
        for name, tensor in places.items():
            memory = tensor.detach().flatten().view(torch.uint8).numpy().data
            begin = first + header[name]["data_offsets"][0]
            parts += [(begin + at, memory[at : at + _PART]) for at in range(0, len(memory), _PART)]
        for _ in readers.map(lambda part: _read(file.fileno(), *part), parts):
            pass


def _read(file: int, offset: int, memory: memoryview) -> None:
    while memory:
        count = os.preadv(file, [memory], offset)
        if not count:
            raise ValueError(f"the file ends at byte {offset}")
        memory, offset = memory[count:], offset + count


@contextmanager
def _fitting(model: PreTrainedModel, path: Path) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
    """The safetensors file `path`, open, and which tensor of `model` each of its entries goes to."""
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            yield file, _match(model, file, path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def _match(model: PreTrainedModel, file: Any, path: Path) -> dict[str, torch.Tensor]:
    """Which tensor of `model` each entry of `file` goes to; a tied tensor may be there under any of its names."""
    present = set(file.keys())
    places: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    for names, tensor in _named_tensors(model):
        name = next((name for name in names if name in present), None)
        present.difference_update(names)
        if name is None:
            problems.append(f"{names[0]} is missing")
            continue
        entry = file.get_slice(name)
        shape, dtype = list(entry.get_shape()), entry.get_dtype()
        expected = _DTYPES[tensor.dtype]
        if shape != list(tensor.shape):
            problems.append(f"{name} has shape {shape}, the model {list(tensor.shape)}")
        elif dtype != expected:
            problems.append(f"{name} has dtype {dtype}, the model {expected}")
        places[name] = tensor
    problems += [f"{name} is not in the model" for name in sorted(present)]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"the weights in {path} do not fit {type(model).__name__}: {'; '.join(problems[:5])}{more}")
    return places


def _named_tensors(model: PreTrainedModel) -> list[tuple[list[str], torch.Tensor]]:
    """Each distinct tensor with all its names, in module order. Tied tensors are one object under several names."""
    distinct: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        distinct.setdefault(id(tensor), ([], tensor.detach()))[0].append(name)
    return list(distinct.values())
