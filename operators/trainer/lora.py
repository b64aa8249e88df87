"""LoRA (arXiv 2106.09685) by peft: trains low-rank matrices beside frozen ones, and publishes their sum.

Outside the trainer (rollouts, relays, a run's final model) the weights are those of a plain model. Only the trainer's
checkpoint holds the adapters themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from operators.trainer.config import LoraConfig

_ADAPTER = "default"
_FROZEN, _TRAINED = ".base_layer.", ".lora_"


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Add adapters, initially without effect, to layers of `model` and freeze all other parameters, in place.

    Raises ValueError if no layer of `model` has one of the names in `config.targets`.
    """
    import peft

    targets = list(config.targets) or "all-linear"
    settings = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets)
    with torch.random.fork_rng(devices=[]):  # every start of the trainer initialises the same adapters
        torch.manual_seed(config.seed)
        peft.inject_adapter_in_model(settings, model, _ADAPTER)


def is_adapter(name: str) -> bool:
    """Whether the tensor `name` belongs to an adapter."""
    return _TRAINED in name


def plain_name(name: str) -> str:
    """The name of the tensor `name` in a model without adapters."""
    return name.replace(_FROZEN, ".")


@torch.no_grad()
def delta_of(model: PreTrainedModel, name: str) -> Tensor | None:
    """BA·α/r, which the adapter of the weight `name` adds to it; None if it has none."""
    layer, frozen, _ = name.partition(_FROZEN + "weight")
    return model.get_submodule(layer).get_delta_weight(_ADAPTER) if frozen else None
