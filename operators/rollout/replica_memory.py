"""The memory of a replica's weights and KV, computed before anything is loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from infra.models.sizes import ELEMENT_BYTES, context_length, kv_values, parameter_count, readable_config
from infra.sizes import size_text
from operators.rollout.config import RolloutConfig

log = logging.getLogger(__name__)

USABLE = 0.9
"""The share of a GPU's free memory for weights and KV; activations, logits and CUDA graphs take of the rest."""


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """Bytes of a replica of a model with so many parameters and, by token, `kv_values` (infra/models/sizes.py)."""

    parameters: int
    kv_values: int
    dtype: str

    @classmethod
    def of(cls, folder: Path, dtype: str) -> ReplicaMemory | None:
        """That of the model in `folder`, computed in `dtype`; None if its config.json does not have the sizes."""
        try:
            return cls(parameter_count(folder), kv_values(readable_config(folder)), dtype)
        except ValueError:  # a model of another kind
            return None

    @property
    def weights(self) -> int:
        """Bytes of the weights."""
        return self.parameters * ELEMENT_BYTES[self.dtype]

    def kv(self, tokens: int) -> int:
        """Bytes of the KV of `tokens` tokens."""
        return tokens * self.kv_values * ELEMENT_BYTES[self.dtype]


def choose_slots(config: RolloutConfig, model: Path, device: torch.device) -> int:
    """The slots of a replica of the transformers engine on `device`: those of `config`, or as many as fit there.

    Raises ValueError with the sizes if its free memory is too small. On a CPU KV takes memory only once it is written,
    so there one slot must fit.
    """
    memory = ReplicaMemory.of(model, config.weights_dtype)
    if memory is None:
        return config.most_slots
    context = config.context or context_length(model)
    if device.type == "cpu":
        fitting_slots(memory, context, psutil.virtual_memory().available, 1, "this machine")
        return config.most_slots
    free = int(USABLE * torch.cuda.mem_get_info(device)[0])
    fitting = fitting_slots(memory, context, free, config.slots or 1, "the GPU (less a tenth for activations)")
    if fitting < config.most_slots:
        log.warning(
            "%d slots: the GPU has no room for the KV of %d with a context of %d tokens; set rollout.context to the "
            "longest prompt and response together to have more",
            *(fitting, config.most_slots, context),
        )
    return min(config.most_slots, fitting)


def fitting_slots(memory: ReplicaMemory, context: int, free: int, least: int, where: str) -> int:
    """How many slots of `context` tokens fit, beside the weights, the `free` bytes of `where`.

    Raises ValueError if they are fewer than `least`.
    """
    left = max(0, free - memory.weights)
    fitting = left // memory.kv(context)
    if fitting >= least:
        return fitting
    needed, kv = memory.weights + memory.kv(least * context), memory.kv(least * context)
    longest = left // memory.kv(least)
    advice = "take a smaller rollout.dtype, a smaller model, or engine 'vllm' with rollout.tensor_parallel"
    if longest:
        fewer = f"lower rollout.slots to at most {fitting} or remove it, or " if fitting else ""
        advice = f"{fewer}lower rollout.context to at most {longest}"
    raise ValueError(
        f"a replica needs {size_text(needed)} (weights {size_text(memory.weights)}, KV {size_text(kv)} for "
        f"rollout.slots = {least} of rollout.context = {context} tokens), but {where} has {size_text(free)} free: "
        f"{advice}"
    )
