"""Checkpoints of the trainer: all of its state in one folder, whole or not at all, and no pickle in it.

A folder is named by its policy version and holds `weights.safetensors` (as rollouts load them), `trainer.safetensors`
(optimizer moments, the critic, LoRA's adapters, random state) and `checkpoint.json` (the rest, and the BLAKE3 of both
files). It is written beside its place, synced to the disk, then renamed: a checkpoint that can be seen is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from operators.trainer.learner import LearnerState
from schemas.records import PolicyVersion

_FORMAT = 1
_WEIGHTS, _TRAINER, _SCALARS = "weights.safetensors", "trainer.safetensors", "checkpoint.json"
_UNFINISHED = ".unfinished-"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why, and what is left."""


@dataclass(frozen=True, slots=True)
class TrainerPosition:
    """How far training is: the policy version reached, the next offset to read of each partition of batches, and how
    many trajectories have been trained on the way.
    """

    version: PolicyVersion
    batch_offsets: tuple[int, ...]
    trajectories_trained: int


def write_checkpoint(
    root: Path, state: LearnerState, position: TrainerPosition, *, keep: int = 2, keep_every: int = 0
) -> Path:
    """Write `state` and `position` under `root` and return the new checkpoint's folder.

    The newest `keep` ≥ 1 checkpoints stay, and those whose version is a multiple of `keep_every` (0: none). Raises
    CheckpointError where the disk does not take it (then those that were there still are) or the version has a
    checkpoint already, ValueError for a `keep` below 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    place = root / str(position.version)
    unfinished = root / f"{_UNFINISHED}{position.version}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(f"{_UNFINISHED}*"):  # of a process that died writing; a run has one trainer
            shutil.rmtree(leftover)
        if place.exists():
            raise CheckpointError(f"there is a checkpoint of version {position.version} in {root} already")
        unfinished.mkdir()
        _write_files(unfinished, state, position)
        unfinished.rename(place)
        _sync(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        left = list_checkpoints(root)
        newest = f"the newest is still {left[-1].name}" if left else "there is none"
        raise CheckpointError(f"cannot write checkpoint {position.version} to {root} ({newest}): {error}") from error
    for old in list_checkpoints(root)[:-keep]:
        if not keep_every or PolicyVersion.parse(old.name).number % keep_every:
            shutil.rmtree(old)
    return place


def read_checkpoint(folder: Path) -> tuple[LearnerState, TrainerPosition]:
    """The state and position in `folder`.

    Raises CheckpointError where something is missing, damaged or of another format.
    """
    try:
        scalars = _read_scalars(folder)
        for name in (_WEIGHTS, _TRAINER):
            if _digest(folder / name) != scalars["blake3"][name]:
                raise CheckpointError(f"{folder / name} is damaged: its BLAKE3 is not the recorded one")
        tensors = load_file(folder / _TRAINER)
        state = LearnerState(
            weights=load_file(folder / _WEIGHTS),
            moments=_under("moments.", tensors),
            random_state=tensors["random_state"],
            updates=scalars["updates"],
            skipped_updates=scalars["skipped_updates"],
            critic_weights=_under("critic.weights.", tensors),
            critic_moments=_under("critic.moments.", tensors),
            adapters=_under("adapters.", tensors),
        )
        return state, _position(scalars)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot read the checkpoint {folder}: {error!r}") from error


def read_position(folder: Path) -> TrainerPosition:
    """The position in `folder` alone, without its tensors. Raises CheckpointError as `read_checkpoint` does."""
    try:
        return _position(_read_scalars(folder))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot read the checkpoint {folder}: {error!r}") from error


def list_checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints under `root`, oldest first; none where there is no such folder."""
    found = []
    for folder in root.iterdir() if root.is_dir() else ():
        try:
            found.append((PolicyVersion.parse(folder.name), folder))
        except ValueError:
            continue  # not a checkpoint's name
    return [folder for _, folder in sorted(found)]


def _write_files(folder: Path, state: LearnerState, position: TrainerPosition) -> None:
    save_file(_on_host("", state.weights), folder / _WEIGHTS, metadata={"format": "pt"})
    rest = {
        **_on_host("moments.", state.moments),
        **_on_host("critic.weights.", state.critic_weights),
        **_on_host("critic.moments.", state.critic_moments),
        **_on_host("adapters.", state.adapters),
        "random_state": state.random_state,
    }
    save_file(rest, folder / _TRAINER)
    scalars = {
        "format": _FORMAT,
        "version": str(position.version),
        "batch_offsets": position.batch_offsets,
        "trajectories_trained": position.trajectories_trained,
        "updates": state.updates,
        "skipped_updates": state.skipped_updates,
        "blake3": {name: _digest(folder / name) for name in (_WEIGHTS, _TRAINER)},
    }
    (folder / _SCALARS).write_text(json.dumps(scalars, indent=2) + "\n")
    for name in (_WEIGHTS, _TRAINER, _SCALARS):
        _sync(folder / name)
    _sync(folder)


def _on_host(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _read_scalars(folder: Path) -> dict[str, Any]:
    scalars = json.loads((folder / _SCALARS).read_text())
    if scalars["format"] != _FORMAT:
        raise CheckpointError(f"{folder} is a checkpoint of format {scalars['format']!r}, this reads {_FORMAT}")
    return dict(scalars)


def _position(scalars: Mapping[str, Any]) -> TrainerPosition:
    version = PolicyVersion.parse(scalars["version"])
    return TrainerPosition(version, tuple(scalars["batch_offsets"]), scalars["trajectories_trained"])


def _digest(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _sync(path: Path) -> None:
    """Wait until the file or folder at `path` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
