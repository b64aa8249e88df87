"""Reads sizes of a model from its folder, without importing model code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_VOCABULARY = ("vocab_size",)
_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def context_length(folder: Path) -> int:
    """The maximum of tokens of prompt and response together for the model in `folder`.

    Raises ValueError naming the folder and the problem.
    """
    return _config_value(folder, _CONTEXT, "the context length")


def vocabulary_size(folder: Path) -> int:
    """The size of the vocabulary of the model in `folder`. Raises ValueError as `context_length`."""
    return _config_value(folder, _VOCABULARY, "the vocabulary size")


def parameter_count(folder: Path) -> int:
    """The number of parameters of the model in `folder`, about: from the size of its weight files and its dtype."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        config = {}
    dtype = config.get("dtype") or config.get("torch_dtype")
    return size // _ELEMENT_BYTES.get(dtype, 4)


def _config_value(folder: Path, names: Sequence[str], what: str) -> int:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is not a model folder: it has no config.json") from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ValueError(f"{file} does not have {what} (none of {', '.join(names)})")
