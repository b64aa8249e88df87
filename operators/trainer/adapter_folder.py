"""The adapters of a LoRA run alone, as peft, vLLM and SGLang load them, with the hashes of the model they are for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors.torch import save_file
from torch import Tensor

from infra.storage import StorageFolder
from infra.store.weight_files import weight_paths
from infra.store.weight_store import mapped
from operators.trainer.checkpoint_files import StoredState
from operators.trainer.config import LoraConfig
from operators.trainer.lora import is_adapter
from operators.trainer.ranks import ALONE

WEIGHTS, CONFIG, BASE = "adapter_model.safetensors", "adapter_config.json", "base_model.json"
_WEIGHTS_PREFIX = "weights."


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
    return "base_model.model." + name.replace(".default", "")


def _peft_config(adapters: Mapping[str, Tensor], config: LoraConfig, base: Path) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.absolute()),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in adapters}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
