"""LoRA (arXiv 2106.09685) by peft: trains low-rank matrices beside frozen ones, and publishes their sum.

Outside the trainer (rollouts, relays, a run's final model) the weights are those of a plain model. Only the trainer's
checkpoint holds the adapters themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from infra.models.weights import weight_tensors
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


def adapters(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapters of `model` by name, not copied; empty if it has none."""
    return {name: tensor for name, tensor in weight_tensors(model).items() if _TRAINED in name}


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of the equivalent plain model, under its names and in its order.

    Tensors are not copied, except for layers with an adapter: W + BA·α/r.
    """
    weights = weight_tensors(model)
    plain = {name.replace(_FROZEN, "."): tensor for name, tensor in weights.items() if _TRAINED not in name}
    for name, layer in _adapted(model):
        plain[f"{name}.weight"] = plain[f"{name}.weight"] + layer.get_delta_weight(_ADAPTER)  # type: ignore[operator]
    return plain


def _adapted(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "get_delta_weight")]
