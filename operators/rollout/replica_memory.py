"""The memory of a replica's weights and KV, computed before anything is loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from infra.counted import counted
from infra.memory import usable_memory
from infra.models.config_files import is_without_weights
from infra.models.empty_model import empty_model
from infra.models.sizes import ELEMENT_BYTES, context_length, kv_values, readable_config, unsupported_features
from infra.models.weights import named_tensors
from infra.sizes import size_text
from infra.store.weight_files import folder_tensors
from operators.rollout.config import RolloutConfig
from operators.rollout.engine import CannotGenerate

log = logging.getLogger(__name__)

USABLE = 0.9
"""The share of a GPU's free memory for weights and KV; activations, logits and CUDA graphs use the rest."""


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """Bytes of a replica of a model with so many parameters and, by token, `kv_values` (infra/models/sizes.py)."""

    parameters: int
    kv_values: int
    dtype: str

    @classmethod
    def of(cls, folder: Path, dtype: str) -> ReplicaMemory | None:
        """The memory of a replica of the model in `folder` in `dtype`; None if its files do not have the sizes."""
        try:
            if is_without_weights(folder):
                parameters = sum(tensor.numel() for _, tensor in named_tensors(empty_model(folder)))
            else:
                parameters = sum(prod(spec.shape) for spec, _ in folder_tensors(folder).values())
            return cls(parameters, kv_values(readable_config(folder)), dtype)
        except (ValueError, FileNotFoundError):  # a model of another kind; loading it reports what is missing
            return None

    @property
    def weights(self) -> int:
        """Bytes of the weights."""
        return self.parameters * ELEMENT_BYTES[self.dtype]

    def kv(self, tokens: int) -> int:
        """Bytes of the KV of `tokens` tokens."""
        return tokens * self.kv_values * ELEMENT_BYTES[self.dtype]


def check_vllm_memory(config: RolloutConfig, model: Path, total: int, share: float = 1.0) -> None:
    """Raise CannotGenerate if vLLM, which uses `share` of a device of `total` bytes, can never have there its part of a
    replica's weights and of the KV of one context.

    Weights that vLLM quantizes or offloads are left to it, and KV that is not of full attention.
    """
    memory, options = ReplicaMemory.of(model, config.weights_dtype), config.vllm
    if memory is None or not options.keys().isdisjoint(("quantization", "cpu_offload_gb")):
        return
    model_config, devices = readable_config(model), config.tensor_parallel
    if "quantization_config" in model_config:
        return
    context = config.context or context_length(model)
    weights, kv = memory.weights // devices, 0
    if unsupported_features(model) is None and "kv_lora_rank" not in model_config:
        heads = model_config.get("num_key_value_heads") or model_config.get("num_attention_heads") or 1
        kv = memory.kv(context) // min(devices, int(heads))
        if options.get("kv_cache_dtype", "auto") != "auto":  # the smallest have a byte
            kv //= ELEMENT_BYTES[config.weights_dtype]
    if weights + kv > share * total:
        setting = "rollout.vllm.gpu_memory_utilization"
        uses = f", of which vLLM uses {size_text(int(share * total))} ({setting} = {share:g})" if share < 1 else ""
        raise CannotGenerate(
            f"a replica needs {size_text(weights + kv)} on each of its {counted(devices, 'device')} (weights "
            f"{size_text(weights)}, KV {size_text(kv)} for one context of {context} tokens), but one has "
            f"{size_text(total)}{uses}: raise rollout.tensor_parallel{f' or {setting}' if uses else ''}, lower "
            "rollout.context, or take a smaller rollout.dtype or model"
        )


def choose_slots(config: RolloutConfig, model: Path, device: torch.device, engines: int = 1) -> int:
    """The slots of each of a replica's `engines`, of transformers, on `device`: those of `config`, or what fits there.

    Raises ValueError with the sizes if its free memory is too small, CannotGenerate if all of it is. On a CPU KV takes
    memory only once it is written, so there the weights alone must fit. On a GPU what fits is rounded down to a
    multiple of 8: replicas whose GPUs have a little more or less free then have equally many slots, as a stage group
    requires.
    """
    memory = ReplicaMemory.of(model, config.weights_dtype)
    if memory is None:
        return config.most_slots
    context = config.context or context_length(model)
    if device.type == "cpu":
        machine, weights = usable_memory(), engines * memory.weights
        if weights > (free := machine.available):
            kind = ValueError if weights <= machine.total else CannotGenerate
            raise kind(
                f"a replica's weights need {size_text(weights)}, but this machine has {size_text(free)} free: "
                "take a smaller rollout.dtype or a smaller model"
            )
        return config.most_slots
    free, total = (int(USABLE * each) // engines for each in torch.cuda.mem_get_info(device))
    least, where = config.slots or 1, "the GPU (less a tenth for activations)"
    try:
        fitting = fitting_slots(memory, context, free, least, where if engines == 1 else f"each half of {where}")
    except ValueError as error:
        if memory.weights + memory.kv(least * context) <= total:
            raise  # another process may free the rest
        raise CannotGenerate(str(error)) from error
    if fitting < config.most_slots:
        log.warning(
            "%d slots: the GPU has no room for the KV of %d with a context of %d tokens; set rollout.context to the "
            "longest prompt and response together to have more",
            *(fitting, config.most_slots, context),
        )
    return min(config.most_slots, fitting - fitting % 8 if fitting > 8 else fitting)


def fitting_slots(memory: ReplicaMemory, context: int, free: int, least: int, where: str) -> int:
    """How many slots of `context` tokens fit, beside the weights, the `free` bytes of `where`.

    Raises ValueError if they are fewer than `least`.
    """
    left = max(0, free - memory.weights)
    fitting = left // memory.kv(context)
    if fitting >= least:
        return fitting
    kv = memory.kv(least * context)
    longest = left // memory.kv(least)
    advice = "take a smaller rollout.dtype, a smaller model, or engine 'vllm' with rollout.tensor_parallel"
    if longest:
        fewer = f"lower rollout.slots to at most {fitting} or remove it, or " if fitting else ""
        advice = f"{fewer}lower rollout.context to at most {longest}"
    weights, needed = size_text(memory.weights), size_text(memory.weights + kv)
    raise ValueError(
        f"a replica needs {needed} (weights {weights}, KV {size_text(kv)} for "
        f"rollout.slots = {least} of rollout.context = {context} tokens), but {where} has {size_text(free)} free: "
        f"{advice}"
    )
