"""Writes the model of a checkpoint as a Hugging Face folder, one tensor at a time, without a learner."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from infra.models.checkpoint_folder import load_tokenizer, write_model
from infra.models.empty_model import empty_model, read_tensor
from infra.models.stored_tensors import StoredTensors, model_tensors
from infra.storage import StorageFolder
from operators.trainer.checkpoint_files import StoredState
from operators.trainer.config import LoraConfig
from operators.trainer.learner_state import check_shapes
from operators.trainer.lora import add_adapters, is_adapter, stored_name
from operators.trainer.published_weights import PublishedWeights
from operators.trainer.ranks import ALONE

_WEIGHTS = "weights."


def write_checkpoint_model(checkpoint: StorageFolder, lora: LoraConfig, base: Path, folder: Path) -> None:
    """Write the float32 weights in `checkpoint`, which any number of ranks wrote, with config and tokenizer to the new
    `folder`; adapters are merged into the weights of `base`, the model of the run.

    Raises CheckpointError for a damaged checkpoint, ValueError if it is not one of `base`, FileExistsError, OSError.
    """
    with StoredState(checkpoint) as stored, model_tensors(base) as frozen:
        stored.verify(ALONE)
        model = empty_model(base)
        if lora.rank:
            add_adapters(model, lora)
        trained = {name: tuple(each.shape) for name, each in model.named_parameters() if each.requires_grad}
        own = {f"{_WEIGHTS}{name}": shape for name, shape in trained.items()}
        check_shapes(own, stored.shapes, _WEIGHTS, "adapters" if lora.rank else "model")
        for name in filter(is_adapter, trained):
            layer, _, parameter = name.rpartition(".")
            setattr(model.get_submodule(layer), parameter, nn.Parameter(stored.tensor(f"{_WEIGHTS}{name}")))
        weights = PublishedWeights(model, read=partial(_read, model, stored, frozen))
        write_model(model, load_tokenizer(base), weights.specs(), weights.items(), folder)


def _read(
    model: PreTrainedModel, stored: StoredState, frozen: StoredTensors, names: list[str], tensor: Tensor
) -> Tensor:
    """`tensor` of `model`, called `names`, from the checkpoint or, if it is not trained, from the model's files."""
    name = next((f"{_WEIGHTS}{name}" for name in names if f"{_WEIGHTS}{name}" in stored.shapes), None)
    if name is not None:
        return stored.tensor(name)
    return read_tensor(model, [plain for each in names if (plain := stored_name(each))], tensor, frozen)
