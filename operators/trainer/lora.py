"""LoRA (arXiv 2106.09685) by peft: small matrices are trained beside frozen ones, and published as their sum.

Whoever sees the weights from outside (rollouts, relays, the model that a run leaves) sees a plain model's: only the
trainer's checkpoint holds the adapters themselves.
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
    """Put adapters that change nothing yet beside layers of `model`, and freeze all else, in place.

    Raises ValueError where no layer of `model` has one of the names in `config.targets`.
    """
    import peft

    targets = list(config.targets) or "all-linear"
    settings = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets)
    with torch.random.fork_rng(devices=[]):  # every start of a trainer begins with the same adapters
        torch.manual_seed(config.seed)
        peft.inject_adapter_in_model(settings, model, _ADAPTER)


def adapters(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapters of `model` by name, its own memory; none where it has none."""
    return {name: tensor for name, tensor in weight_tensors(model).items() if _TRAINED in name}


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of the plain model that computes what `model` does, under its names and in its order.

    Its own memory, but for layers that have an adapter: W + BA·α/r.
    """
    weights = weight_tensors(model)
    plain = {name.replace(_FROZEN, "."): tensor for name, tensor in weights.items() if _TRAINED not in name}
    for name, layer in _adapted(model):
        plain[f"{name}.weight"] = plain[f"{name}.weight"] + layer.get_delta_weight(_ADAPTER)  # type: ignore[operator]
    return plain


def _adapted(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "get_delta_weight")]
