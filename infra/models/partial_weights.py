"""Loads parts of a model from a weight version that has not arrived completely.

Each chunk that has bytes of these parts is compared with its CRC-32C in the manifest first: a chunk that has not
arrived, or is damaged, is never computed with. (The BLAKE3 of the whole version is known only when it is complete.)
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from crc32c import crc32c
from transformers import PreTrainedModel

from infra.models.device_copies import read_part, synchronize
from infra.models.dtypes import TORCH_DTYPES
from infra.models.weights import named_tensors
from infra.store import names
from infra.store.layout import Layout
from infra.store.model_parts import layer_of, model_parts
from infra.store.weight_store import open_mapped
from schemas.records import PolicyVersion, WeightVersion


class PartsMissing(RuntimeError):
    """The machine does not have the wanted parts of a version."""


def open_arriving(store: Path, version: PolicyVersion) -> memoryview:
    """The bytes of `version` in the folder `store`, mapped: complete, or as far as they have arrived.

    Raises PartsMissing.
    """
    for name in (names.weight_file(version), f"{version}{names.PARTIAL}", names.weight_file(version)):
        try:
            return open_mapped(store / name)
        except (FileNotFoundError, ValueError):  # a file of 0 bytes cannot be mapped
            continue
    raise PartsMissing(f"version {version} is not arriving in {store}")


def load_parts(model: PreTrainedModel, manifest: WeightVersion, data: memoryview, layers: range, *, ends: bool) -> None:
    """Copy `layers`, and with `ends` the tensors outside of layers, from `data` into `model`, rounded to its precision.

    Raises PartsMissing for a chunk without the checksum of the manifest, ValueError if the version does not have the
    tensors of `model`; the model is then unchanged.
    """
    if len(data) != manifest.bytes:
        raise PartsMissing(f"version {manifest.version} has {len(data)} bytes here, {manifest.bytes} are declared")
    parts = model_parts(manifest)
    if layers.stop > len(parts.layers):
        raise ValueError(f"version {manifest.version} has {len(parts.layers)} layers, no layer {layers.stop - 1}")
    chunks = set(parts.ends) if ends else set()
    chunks = chunks.union(*(parts.layers[layer] for layer in layers))
    for chunk in sorted(chunks):
        start = chunk * manifest.chunk_bytes
        if crc32c(data[start : start + manifest.chunk_bytes]) != manifest.chunk_checksums[chunk]:
            raise PartsMissing(f"chunk {chunk} of version {manifest.version} has not arrived")
    ranges = Layout(manifest.tensors).tensor_ranges()
    specs = {spec.name: spec for spec in manifest.tensors}
    copies = []
    for known, tensor in named_tensors(model):
        name = next((name for name in known if name in ranges), None)
        if name is None or specs[name].shape != tuple(tensor.shape):
            raise ValueError(f"version {manifest.version} does not fit {type(model).__name__}: tensor {known[0]}")
        layer = layer_of(name)
        if (ends if layer is None else layer in layers) and ranges[name][0] < ranges[name][1]:
            copies.append((tensor, name))
    with torch.no_grad():
        for tensor, name in copies:
            stored, dtype = data[slice(*ranges[name])], TORCH_DTYPES[specs[name].dtype]
            if tensor.is_cuda:
                read_part(partial(_copy, stored), tensor, dtype)
            else:
                tensor.copy_(torch.frombuffer(bytearray(stored), dtype=dtype).view(tensor.shape))
    synchronize(*(tensor.device for tensor, _ in copies))


def _copy(source: memoryview, target: memoryview) -> None:
    target[:] = source
