"""Reads sizes of a model from its folder, without importing model code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.json_text import decode_json

_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_VOCABULARY = ("vocab_size",)
_WIDTH = ("hidden_size", "n_embd")
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number of each data type of weights and computation."""


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
    config = readable_config(folder)
    dtype = config.get("dtype") or config.get("torch_dtype")
    return size // ELEMENT_BYTES.get(str(dtype), 4)


def adapter_parameters(folder: Path, rank: int) -> int:
    """The parameters of adapters of `rank` for all matrices of the layers of the model in `folder`, at most about.

    An adapter of a matrix of m x n has rank (m + n) parameters. In Llama's layers, with any width of their MLP from
    the hidden size h on, these are together less than 3 rank / h of the matrices' own.
    """
    config, parameters = readable_config(folder), parameter_count(folder)
    width = _first_of(config, _WIDTH)
    return min(parameters, 3 * rank * parameters // width) if width else parameters


def kv_values(config: Mapping[str, Any]) -> int:
    """How many numbers the keys and values of one token are, in all layers, by a model's config.json.

    Raises ValueError if it has no such size.
    """
    names = ("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"), _WIDTH
    layers, heads, width = (_first_of(config, each) for each in names)
    if not (layers and heads and width):
        raise ValueError("config.json has no numbers of layers and attention heads, or no hidden size")
    return 2 * layers * int(config.get("num_key_value_heads") or heads) * int(config.get("head_dim") or width // heads)


def unsupported_features(folder: Path) -> str | None:
    """The features that the config.json in `folder` names and that cannot be trained; None without any.

    A model may have others, or have these without naming them: the trainer compares logprobs at its start.
    """
    config = readable_config(folder)
    if config.get("text_config"):
        return "a text_config: it is not of text alone"
    layers = config.get("layer_types")
    others = sorted({str(each) for each in layers} - {"full_attention"}) if isinstance(layers, list) else []
    names = ["attn_logit_softcapping", "final_logit_softcapping"]
    windows = config.get("use_sliding_window", config.get("model_type") in ("mistral", "mixtral"))
    all_full = (config.get("max_window_layers") or 0) >= (config.get("num_hidden_layers") or 1)
    if not isinstance(layers, list) and windows and not all_full:
        names.append("sliding_window")
    found = [f"{name} = {config[name]}" for name in names if config.get(name)]
    scales = [
        f"{name} = {config[name]}" for name in ("logits_scaling", "logit_scale") if config.get(name) not in (None, 1)
    ]
    return ", ".join([*(f"layers of {each}" for each in others), *found, *scales]) or None


def readable_config(folder: Path) -> dict[str, Any]:
    """The config.json in `folder`; empty if it is not a readable JSON object."""
    try:
        config = decode_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _first_of(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """The value of the first of `names` that `config` has; 0 without one."""
    return next((int(config[name]) for name in names if config.get(name)), 0)


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
