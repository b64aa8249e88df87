"""Writes a Hugging Face folder from tensors that are given one at a time, so that the model need not be whole."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infra.models.checkpoint_folder import new_folder
from infra.models.dtypes import DTYPES
from infra.store.layout import Layout
from infra.store.weight_files import SINGLE
from schemas.records import TensorSpec


def write_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    specs: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    path: Path,
) -> None:
    """Write `tensors`, config and tokenizer atomically to the new folder `path`.

    `model` has the configs; its tensors are not used. `specs` has the name, dtype and shape of each of `tensors`.
    Raises FileExistsError if `path` exists and is not an empty folder, OSError if it cannot be written.
    """
    with new_folder(path) as folder:
        folder.mkdir()
        config = type(model.config).from_dict(model.config.to_dict())
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _write_tensors(folder / SINGLE, specs, tensors)


def _write_tensors(file: Path, specs: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    layout = Layout([TensorSpec(name, DTYPES[each.dtype], tuple(each.shape)) for name, each in specs.items()])
    places = layout.places()
    with file.open("wb") as sink:
        sink.write(layout.header)
        for name, tensor in tensors:
            sink.seek(places.pop(name))
            sink.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        sink.flush()
        os.fsync(sink.fileno())
    if places:
        raise ValueError(f"{file} lacks {len(places)} tensors, such as {min(places)}")
