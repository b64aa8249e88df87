"""Reads sizes of a model from its folder, without importing model code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.json_text import decode_json

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
    config = _readable_config(folder)
    dtype = config.get("dtype") or config.get("torch_dtype")
    return size // _ELEMENT_BYTES.get(str(dtype), 4)


def unsupported_attention(folder: Path) -> str | None:
    """The features of attention that the config.json in `folder` names and that cannot be trained; None without any.

    A model may have others, or have these without naming them: the trainer compares logprobs at its start.
    """
    config = _readable_config(folder)
    layers = config.get("layer_types")
    others = sorted({str(each) for each in layers} - {"full_attention"}) if isinstance(layers, list) else []
    caps = [name for name in ("attn_logit_softcapping", "final_logit_softcapping") if config.get(name)]
    return ", ".join([*(f"layers of {each}" for each in others), *caps]) or None


def _readable_config(folder: Path) -> dict[str, Any]:
    """The config.json in `folder`; empty if it is not a readable JSON object."""
    try:
        config = decode_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _config_value(folder: Path, names: Sequence[str], what: str) -> int:
    file = folder / "config.json"
    try:
        config = decode_json(file.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is not a model folder: it has no config.json") from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not a JSON object")
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ValueError(f"{file} does not have {what} (none of {', '.join(names)})")
