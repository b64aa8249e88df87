"""A model's weights as one safetensors file, which the trainer publishes, relays transfer and rollouts load.

The layout is that of the model: every parameter and persistent buffer once, under its first name in module order, and
the experts of a mixture separately, as in a checkpoint. A tied tensor has no entry of its own, so it is never stored
twice.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from blake3 import blake3
from safetensors.torch import save_file
from transformers import PreTrainedModel

from infra.models.checkpoint_names import checkpoint_tensors
from infra.models.device_copies import host_parts, read_part, synchronize
from infra.models.dtypes import DTYPES, TORCH_DTYPES
from infra.store.weight_files import TensorPlace, tensor_places, tensors_in
from infra.store.weight_store import mapped, open_mapped

_PART_BYTES = {"cpu": 32 << 20, "cuda": 16 << 20}
"""Bytes that one thread reads at a time, for tensors on each kind of device; as many are read without other threads."""
_READER_THREADS = {"cpu": 4, "cuda": 12}
"""The most threads that read. One copies 2.5 GB/s from shared memory into pinned memory, which a GPU empties at 55."""


def weight_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The distinct tensors of `model` by name, in module order: detached views of the model's memory."""
    return {names[0]: tensor for names, tensor in named_tensors(model)}


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """BLAKE3 over names, dtypes, shapes and bytes of `tensors`, in their order: equal only for equal weights."""
    digest = WeightsDigest()
    for _ in digest.added(tensors.items()):
        pass
    return digest.hexdigest()


class WeightsDigest:
    """`weights_digest` of tensors that are given one at a time."""

    def __init__(self) -> None:
        self._digest = blake3()

    def added(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `tensors`, adding each before it is yielded."""
        for name, tensor in tensors:
            self._digest.update(f"{name} {DTYPES[tensor.dtype]} {list(tensor.shape)}\0".encode())
            for part in host_parts(tensor):
                self._digest.update(part.view(torch.uint8).numpy().data)
            yield name, tensor

    def hexdigest(self) -> str:
        """The digest of the tensors so far."""
        return self._digest.hexdigest()


def save_weights(model: PreTrainedModel, path: Path) -> None:
    """Write the weights of `model` atomically to `path`; equal weights give equal bytes."""
    tensors = {name: tensor.contiguous() for name, tensor in weight_tensors(model).items()}
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.replace(path)


def load_weights(model: PreTrainedModel, path: Path, *, rounds: bool = False) -> None:
    """Copy the weights in the safetensors file `path` into `model`, in place.

    `rounds`: floating-point tensors of another precision are rounded to the model's. Raises FileNotFoundError if the
    file does not exist, ValueError if it is not a safetensors file or its names, shapes or dtypes do not match; all is
    checked first, so `model` is unchanged after an error.
    """
    places = _places(path)
    tensors = _match(model, places, path, rounds)
    whole = {name: tensor.detach() for name, tensor in tensors.items() if tensor.is_contiguous()}
    same = {name for name, tensor in whole.items() if places[name].spec.dtype == DTYPES[tensor.dtype]}
    direct = {name: tensor for name, tensor in whole.items() if tensor.is_cuda or (tensor.is_cpu and name in same)}
    _read_all(path, places, direct)
    for name in tensors.keys() - direct.keys():
        spec = places[name].spec
        read = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
        _read_all(path, places, {name: read})
        with torch.no_grad():
            tensors[name].copy_(read)


def check_weights(model: PreTrainedModel, path: Path, *, rounds: bool = False) -> None:
    """Check as `load_weights`, with the same errors, without loading: `model` may be on the meta device."""
    _match(model, _places(path), path, rounds)


def read_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read tensors of the safetensors file `path` into `tensors`, which must be contiguous and of their dtypes.

    Reading takes half the time of mapping, which would fault in the pages of each new file one by one.
    """
    _read_all(path, _places(path), tensors)


def mapped_tensors(path: Path) -> list[tuple[str, torch.Tensor]]:
    """The tensors of the safetensors file `path` with their names, read-only and mapped while any is referenced.

    Raises FileNotFoundError if the file does not exist, ValueError if it is not a safetensors file.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about read-only memory
        return [
            (name, torch.from_numpy(data).view(TORCH_DTYPES[spec.dtype]).view(spec.shape))
            for name, (spec, data) in tensors_in(open_mapped(path)).items()
        ]


def _read_all(path: Path, places: Mapping[str, TensorPlace], tensors: Mapping[str, torch.Tensor]) -> None:
    """Read into `tensors`, which are contiguous; those on a GPU may have another dtype than the file."""
    reads: list[Callable[[int], None]] = []
    kind = "cuda" if any(tensor.is_cuda for tensor in tensors.values()) else "cpu"
    for name, tensor in tensors.items():
        dtype = TORCH_DTYPES[places[name].spec.dtype]
        begin, flat = places[name].start, tensor.detach().flatten()
        for part in flat.split(_PART_BYTES[kind] // dtype.itemsize):
            reads.append(partial(_read_tensor, offset=begin, target=part, dtype=dtype))
            begin += len(part) * dtype.itemsize
    few = sum(places[name].end - places[name].start for name in tensors) <= _PART_BYTES[kind]
    with path.open("rb", buffering=0) as file:
        if few:  # threads would take longer to start than to read
            for read in reads:
                read(file.fileno())
        else:
            with ThreadPoolExecutor(min(_READER_THREADS[kind], os.cpu_count() or 1)) as readers:
                for _ in readers.map(lambda read: read(file.fileno()), reads):
                    pass
    synchronize(*(tensor.device for tensor in tensors.values()))


def _read_tensor(file: int, offset: int, target: torch.Tensor, dtype: torch.dtype) -> None:
    read = partial(_read, file, offset)
    if target.is_cuda:
        read_part(read, target, dtype)
    else:
        read(target.view(torch.uint8).numpy().data)


def _read(file: int, offset: int, memory: memoryview) -> None:
    while memory:
        count = os.preadv(file, [memory], offset)
        if not count:
            raise ValueError(f"the file ends at byte {offset}")
        memory, offset = memory[count:], offset + count


def _places(path: Path) -> dict[str, TensorPlace]:
    """The position of each tensor in the safetensors file `path`. Raises FileNotFoundError, ValueError."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no weight file {path}")
    try:
        with mapped(path) as data:
            return tensor_places(data)
    except ValueError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def _match(
    model: PreTrainedModel, entries: Mapping[str, TensorPlace], path: Path, rounds: bool
) -> dict[str, torch.Tensor]:
    """The tensor of `model` for each of `entries`; a tied tensor may be listed under any of its names."""
    unexpected = set(entries)
    tensors: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    for names, tensor in named_tensors(model):
        name = next((name for name in names if name in entries), None)
        unexpected.difference_update(names)
        if name is None:
            problems.append(f"{names[0]} is missing")
            continue
        entry, expected = entries[name].spec, DTYPES[tensor.dtype]
        if entry.shape != tuple(tensor.shape):
            problems.append(f"{name} has shape {list(entry.shape)}, the model {list(tensor.shape)}")
        elif entry.dtype != expected and not (rounds and _is_floating(entry.dtype) and tensor.is_floating_point()):
            problems.append(f"{name} has dtype {entry.dtype}, the model {expected}")
        tensors[name] = tensor
    problems += [f"{name} is not in the model" for name in sorted(unexpected)]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"the weights in {path} do not fit {type(model).__name__}: {'; '.join(problems[:5])}{more}")
    return tensors


def _is_floating(dtype: str) -> bool:
    return dtype in TORCH_DTYPES and TORCH_DTYPES[dtype].is_floating_point


def named_tensors(model: PreTrainedModel) -> list[tuple[list[str], torch.Tensor]]:
    """Each distinct tensor with all its names in a checkpoint, in module order. Tied tensors have several names."""
    kind = getattr(model.config, "model_type", "")
    return [each for names, tensor in distinct_tensors(model) for each in checkpoint_tensors(kind, names, tensor)]


def distinct_tensors(model: torch.nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Each distinct tensor of `model` with all its names in the model, in module order, detached."""
    distinct: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        distinct.setdefault(id(tensor), ([], tensor.detach()))[0].append(name)
    return list(distinct.values())
