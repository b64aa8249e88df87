"""Writes a weight version to a Hugging Face folder from a place of this machine (see `weight_places.py`)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infra.files import new_folder
from pipelines.config import Config
from pipelines.inspect.weight_places import WeightPlace

COPIED = ("*.json", "*.jinja", "*.model", "*.txt")
"""The files of a model folder that are copied beside the weights: configuration and tokenizer."""


def pull_from_place(place: WeightPlace, config: Config, model: Path, folder: Path) -> str | None:
    """Write the version in `place`, of the run of `config`, to the new `folder`; return the source.

    None if the version has been evicted meanwhile. Raises FileExistsError, FileNotFoundError without a model folder,
    CheckpointError for a damaged checkpoint.
    """
    if place.kind in ("store", "disk", "object store"):
        return None  # the caller has tried them
    if place.kind == "checkpoint":
        return _convert(place, config, model, folder)
    with new_folder(folder) as unfinished:
        shutil.copytree(Path(str(place.path)), unfinished, dirs_exist_ok=True)
    return str(place.path)


def _convert(place: WeightPlace, config: Config, model: Path, folder: Path) -> str:
    """Write the model of a checkpoint; adapters are merged into their weights."""
    if not model.is_dir():
        raise FileNotFoundError(f"{model} does not exist: give the run's model folder with --model")
    from infra.storage import local_copy
    from operators.trainer.checkpoint_files import file_names, read_manifest
    from operators.trainer.checkpoint_model import write_checkpoint_model
    from operators.trainer.config import BUILT_IN_LEARNER
    from operators.trainer.replay import Replay

    learner = config.trainer.learner
    shares = config.trainer.shares
    alone = replace(config.trainer, device="cpu", gpus=(), ranks=1, batch_shares=shares, shard_ranks=0, context_ranks=1)
    with (
        new_folder(folder) as unfinished,
        local_copy(place.path, tuple(file_names(read_manifest(place.path)))) as local,
    ):
        unfinished.rmdir()  # written anew, as a whole
        if learner.name == BUILT_IN_LEARNER:
            write_checkpoint_model(local, learner.lora, model, unfinished)
        else:  # only it knows how its state makes the weights
            Replay(alone, model, divisions=config.experience.divisions, checkpoint=local).save(unfinished)
    return str(place.path)


def pull_adapters(places: Sequence[WeightPlace], config: Config, model: Path, folder: Path, version: str) -> str:
    """Write the adapters of `version` to the new `folder` from the first checkpoint among its `places`; return it.

    Raises ValueError if it is in no checkpoint or the run has no adapters, FileExistsError, FileNotFoundError without
    the model folder, CheckpointError for a damaged checkpoint.
    """
    lora = config.trainer.learner.lora
    if not lora.rank:
        raise ValueError(f"run {config.run.name} has no adapters: trainer.learner.lora.rank is 0")
    checkpoint = next((place.path for place in places if place.kind == "checkpoint"), None)
    if checkpoint is None:
        raise ValueError(f"version {version} is in no checkpoint: published versions have the adapters merged")
    from infra.storage import local_copy
    from operators.trainer.adapter_folder import write_adapters
    from operators.trainer.checkpoint_files import file_names, read_manifest

    with (
        new_folder(folder) as unfinished,
        local_copy(checkpoint, tuple(file_names(read_manifest(checkpoint)))) as local,
    ):
        write_adapters(local, lora, model, unfinished, version)
    return str(checkpoint)
