"""Model folders as `AutoModelForCausalLM.from_pretrained` reads them, loaded from disk alone and written whole.

Never reaches the network, never runs code from a folder, reads and writes safetensors alone.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_model(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The causal language model in folder `path`, in `dtype`, on the CPU, in evaluation mode.

    Raises FileNotFoundError naming what `path` lacks, ValueError if it is there but cannot be loaded.
    """
    _need(path, "config.json", ("config.json",))
    _need(path, "weights", _WEIGHTS)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"the model in {path} cannot be loaded as a causal language model: {error}") from error
    if missing := sorted(found["missing_keys"]):
        # transformers would go on with random values in their place.
        raise ValueError(f"the weights in {path} lack {len(missing)} tensors of its config, such as {missing[0]}")
    loaded: PreTrainedModel = model.eval()
    _refuse_untied(loaded, path)
    return loaded


def _refuse_untied(model: PreTrainedModel, path: Path) -> None:
    """Raise ValueError where the config ties the output's weights to the embedding's and the file has others."""
    output = model.get_output_embeddings()
    if not getattr(model.config, "tie_word_embeddings", False) or output is None:
        return
    if output.weight is not model.get_input_embeddings().weight:
        raise ValueError(
            f"the model in {path} has output weights of its own, but its config.json ties them to the embedding: "
            "set tie_word_embeddings to false there, or remove the output's weights from the file"
        )


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in folder `path`; its `generation_stop_tokens` are those of the model's generation_config.json.

    Raises FileNotFoundError naming what `path` lacks, ValueError if it is there but cannot be loaded.
    """
    _need(path, "tokenizer", _TOKENIZER)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"the tokenizer in {path} cannot be loaded: {error}") from error
    tokenizer.generation_stop_tokens = _generation_stop_tokens(path / "generation_config.json")
    return tokenizer


def _generation_stop_tokens(file: Path) -> tuple[int, ...]:
    """The `eos_token_id`s of a generation_config.json; none where there is no file, or it names none."""
    if not file.is_file():
        return ()
    try:
        ends = json.loads(file.read_text()).get("eos_token_id")
        return () if ends is None else (int(ends),) if isinstance(ends, int) else tuple(int(end) for end in ends)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"eos_token_id in {file} must be a token id or a list of them: {error}") from error


def save_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write `model` and `tokenizer` to the new folder `path`, complete from the moment it is there.

    Raises FileExistsError if `path` is there already and is not an empty folder.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} is there already: choose another folder or remove it")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.replace(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _need(path: Path, what: str, names: tuple[str, ...]) -> None:
    """Raise FileNotFoundError unless folder `path` has one of the files `names`."""
    if not path.is_dir():
        raise FileNotFoundError(f"there is no model folder at {path}: name a folder saved by `save_pretrained`")
    if not any((path / name).is_file() for name in names):
        wanted = " or ".join(names)
        hint = "; pickled weights (.bin) are not read" if any(path.glob("*.bin")) else ""
        raise FileNotFoundError(
            f"the model folder {path} has no {what} ({wanted}): copy it there or save the model again{hint}"
        )
