"""LoRA (arXiv 2106.09685) by peft: trains low-rank matrices beside frozen ones, and publishes their sum.

Outside the trainer (rollouts, relays, a run's final model) the weights are those of a plain model. Only the trainer's
checkpoint holds the adapters themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from infra.models.local_part import local_part
from operators.trainer.config import LoraConfig

_ADAPTER = "default"
_FROZEN, _TRAINED = ".base_layer.", ".lora_"


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Add adapters to layers of `model`, on the meta device, and freeze all other parameters, in place.

    Raises ValueError for one of `config.targets` that names no layer, or one whose adapter cannot be trained.
    """
    import peft

    for target in config.targets:
        _check_target(model, target)
    targets = list(config.targets) or "all-linear"
    settings = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets)
    peft.inject_adapter_in_model(settings, model, _ADAPTER, low_cpu_mem_usage=True)


def _check_target(model: PreTrainedModel, target: str) -> None:
    """Raise ValueError if no layer of `model` is called `target`, or if one is not linear or has the weights of the
    embedding."""
    modules = dict(model.named_modules())
    found = [module for name, module in modules.items() if f".{name}".endswith(f".{target}")]
    if not found:
        names = sorted({name.rpartition(".")[2] for name, each in modules.items() if hasattr(each, "weight")})
        raise ValueError(f"trainer.learner.lora.targets: no layer is called {target!r}; there are {', '.join(names)}")
    other = next((each for each in found if not isinstance(each, nn.Linear | Conv1D)), None)
    if other is not None:
        raise ValueError(
            f"trainer.learner.lora.targets: {target!r} is of type {type(other).__name__}, and only linear layers have "
            "adapters: remove it"
        )
    embedding = model.get_input_embeddings().weight
    if any(getattr(each, "weight", None) is embedding for each in found):
        raise ValueError(
            f"trainer.learner.lora.targets: {target!r} shares the weights of the embedding in this model "
            "(tie_word_embeddings), so its adapter could not be merged into them: remove it"
        )


@torch.no_grad()
def initialise_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Set adapters to initial values without effect, the same at every start and with any number of ranks.

    As in peft: A is uniform in ±1/√in and B is 0.
    """
    generator = torch.Generator().manual_seed(config.seed)
    for name, adapter in model.named_parameters():
        if not is_adapter(name):
            continue
        full = torch.zeros(adapter.shape)
        if ".lora_A." in name:
            bound = adapter.shape[1] ** -0.5
            full.uniform_(-bound, bound, generator=generator)
        part = local_part(adapter)
        part.elements.copy_(full.flatten()[part.begin : part.end])


def is_adapter(name: str) -> bool:
    """Whether the tensor `name` belongs to an adapter."""
    return _TRAINED in name


def plain_name(name: str) -> str:
    """The name of the tensor `name` in a model without adapters."""
    return name.replace(_FROZEN, ".")


def stored_name(name: str) -> str | None:
    """The name of the tensor `name` in the model's weight files, None for an adapter's."""
    return None if is_adapter(name) else plain_name(name)


@torch.no_grad()
def delta_of(model: PreTrainedModel, name: str) -> Tensor | None:
    """BA·α/r, which the adapter of the weight `name` adds to it; None if it has none.

    With several ranks a collective.
    """
    layer, frozen, _ = name.partition(_FROZEN + "weight")
    return model.get_submodule(layer).get_delta_weight(_ADAPTER) if frozen else None
