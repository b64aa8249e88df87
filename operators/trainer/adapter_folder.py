"""The adapters of a LoRA run alone, as peft, vLLM and SGLang load them, with the hashes of the model they are for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors.torch import save_file
from torch import Tensor

from infra.storage import StorageFolder
from infra.store.weight_files import folder_tensors, weight_paths
from infra.store.weight_store import mapped
from operators.trainer.checkpoint_files import StoredState
from operators.trainer.config import LoraConfig
from operators.trainer.lora import is_adapter
from operators.trainer.ranks import ALONE

WEIGHTS, CONFIG, BASE = "adapter_model.safetensors", "adapter_config.json", "base_model.json"
_WEIGHTS_PREFIX, _PEFT_PREFIX = "weights.", "base_model.model."


def write_adapters(checkpoint: StorageFolder, config: LoraConfig, base: Path, folder: Path, version: str) -> int:
    """Write the adapters in `checkpoint`, which any number of ranks wrote, to `folder`; return their bytes.

    `base_model.json` names the `version` and the BLAKE3 of each weight file of `base`, the model of the run. Raises
    CheckpointError for a damaged checkpoint, ValueError for one without adapters, FileNotFoundError without the model.
    """
    with StoredState(checkpoint) as stored:
        stored.verify(ALONE)
        names = [name for name in stored.shapes if name.startswith(_WEIGHTS_PREFIX) and is_adapter(name)]
        if not names:
            raise ValueError(f"the checkpoint {checkpoint} has no adapters: its run trained all weights")
        adapters = {_peft_name(name.removeprefix(_WEIGHTS_PREFIX)): stored.tensor(name) for name in names}
    _write_json(folder / BASE, {"version": version, "model": str(base.absolute()), "blake3": base_digests(base)})
    _write_json(folder / CONFIG, _peft_config(adapters, config, base))
    save_file(adapters, folder / WEIGHTS, {"format": "pt"})
    return sum(tensor.nbytes for tensor in adapters.values())


def base_digests(base: Path) -> dict[str, str]:
    """The BLAKE3 (hex) of each weight file of the model in `base`. Raises FileNotFoundError, ValueError."""
    digests = {}
    for path in weight_paths(base):
        with mapped(path) as data:
            digests[path.name] = blake3(data, max_threads=blake3.AUTO).hexdigest()
    return digests


def _peft_name(name: str) -> str:
    """The name of an adapter in peft's files: without the adapter's own name."""
    return _PEFT_PREFIX + name.replace(".default", "")


def _peft_config(adapters: Mapping[str, Tensor], config: LoraConfig, base: Path) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.absolute()),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": _targets({_module(name) for name in adapters}, folder_tensors(base)),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def _module(name: str) -> str:
    """The module with the adapter that peft's files call `name`."""
    return name.removeprefix(_PEFT_PREFIX).partition(".lora_")[0]


def _targets(modules: Collection[str], base: Iterable[str]) -> list[str]:
    """Names by which peft finds `modules` alone in the model with the tensors `base`: a last part, such as q_proj, if
    all modules called so have adapters, else full names.
    """
    adapted, all_of_base = (
        Counter(name.rpartition(".")[2] for name in names)
        for names in (modules, [name.removesuffix(".weight") for name in base if name.endswith(".weight")])
    )
    lasts = {each: each.rpartition(".")[2] for each in modules}
    return sorted({last if adapted[last] == all_of_base[last] else each for each, last in lasts.items()})


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
