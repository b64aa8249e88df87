"""Model folders for `AutoModelForCausalLM.from_pretrained`: loaded from disk only, and written atomically.

This never connects to the network, never runs code from a folder, and reads and writes only safetensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from infra.files import new_folder
from infra.models.device_copies import host_parts
from infra.models.dtypes import tensor_specs
from infra.store.layout import Layout
from infra.store.weight_files import SINGLE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_model(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the causal language model in folder `path`, in `dtype`, on the CPU, in evaluation mode.

    Raises FileNotFoundError naming the missing file, ValueError if the model cannot be loaded.
    """
    from transformers import AutoModelForCausalLM  # here: it takes as long as torch, and a tokenizer needs none of it

    require_weights(path)
    try:
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"the model in {path} cannot be loaded as a causal language model: {error}") from error
    if missing := sorted(loading_info["missing_keys"]):
        # transformers would continue with random values instead.
        raise ValueError(f"the weights in {path} lack {len(missing)} tensors of its config, such as {missing[0]}")
    loaded: PreTrainedModel = model.eval()
    _reject_untied_output(loaded, path)
    return loaded


def _reject_untied_output(model: PreTrainedModel, path: Path) -> None:
    """Raise ValueError if the config ties the output weights to the embedding but the file has other output weights."""
    output = model.get_output_embeddings()
    if not getattr(model.config, "tie_word_embeddings", False) or output is None:
        return
    if output.weight is not model.get_input_embeddings().weight:
        raise ValueError(
            f"the model in {path} has separate output weights, but its config.json ties them to the embedding: "
            "set tie_word_embeddings to false there, or remove the output weights from the file"
        )


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in folder `path`; its `generation_stop_tokens` are those of generation_config.json.

    Raises FileNotFoundError naming the missing file, ValueError if the tokenizer cannot be loaded.
    """
    _require_file(path, "tokenizer", _TOKENIZER)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"the tokenizer in {path} cannot be loaded: {error}") from error
    tokenizer.generation_stop_tokens = _generation_stop_tokens(path / "generation_config.json")
    return tokenizer


def _generation_stop_tokens(file: Path) -> tuple[int, ...]:
    """The `eos_token_id`s of a generation_config.json; none if there is no file or no such entry."""
    if not file.is_file():
        return ()
    try:
        ends = json.loads(file.read_bytes()).get("eos_token_id")
        return () if ends is None else (int(ends),) if isinstance(ends, int) else tuple(int(end) for end in ends)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"eos_token_id in {file} must be a token id or a list of them: {error}") from error


def save_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write `model` and `tokenizer` atomically to the new folder `path`. Raises FileExistsError as `new_folder`."""
    with new_folder(path) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def require_weights(path: Path) -> None:
    """Raise FileNotFoundError unless folder `path` has a config and weights."""
    require_config(path)
    _require_file(path, "weights", _WEIGHTS)


def require_config(path: Path) -> None:
    """Raise FileNotFoundError unless folder `path` has a config."""
    _require_file(path, "config.json", ("config.json",))


def _require_file(path: Path, what: str, names: tuple[str, ...]) -> None:
    """Raise FileNotFoundError unless folder `path` has one of the files `names`."""
    if not path.is_dir():
        raise FileNotFoundError(f"there is no model folder at {path}: name a folder saved by `save_pretrained`")
    if not any((path / name).is_file() for name in names):
        wanted = " or ".join(names)
        hint = "; pickled weights (.bin) are not read" if any(path.glob("*.bin")) else ""
        raise FileNotFoundError(
            f"the model folder {path} has no {what} ({wanted}): copy it there or save the model again{hint}"
        )


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
        config = type(model.config).from_dict(model.config.to_dict())
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _write_tensors(folder / SINGLE, specs, tensors)


def _write_tensors(file: Path, specs: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    layout = Layout(tensor_specs(specs))
    places = layout.places()
    with file.open("wb") as sink:
        sink.write(layout.header)
        for name, tensor in tensors:
            sink.seek(places.pop(name))
            for part in host_parts(tensor):
                sink.write(part.view(torch.uint8).numpy().data)
        sink.flush()
        os.fsync(sink.fileno())
    if places:
        raise ValueError(f"{file} lacks {len(places)} tensors, such as {min(places)}")


def preload_model_code(folder: Path) -> None:
    """Import the modules for the model and tokenizer in `folder`; no weights are read.

    Errors of the folder are ignored here: loading the model reports them.
    """
    from transformers import AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError):
        return
