"""Checkpoints of the trainer: all of its state in one folder, whole or not at all, and no pickle in it.

A folder is named by its policy version and holds `weights.safetensors` (as rollouts load them), `trainer.safetensors`
(optimizer moments, the critic, LoRA's adapters, random state) and `checkpoint.json` (the rest, and the BLAKE3 of both
files). On a disk it is written beside its place, synced, then renamed; to an object store its files are uploaded, the
last one being checkpoint.json, without which it is none. So a checkpoint that can be seen is complete.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from infra.files import describe_free_space, is_out_of_space
from infra.storage import RemotePath, StorageFolder, local_copy
from operators.trainer.learner import LearnerState
from operators.trainer.persist import CheckpointError
from schemas.records import PolicyVersion

log = logging.getLogger(__name__)

_FORMAT = 1
_WEIGHTS, _TRAINER, _SCALARS = "weights.safetensors", "trainer.safetensors", "checkpoint.json"
_FILES = (_WEIGHTS, _TRAINER, _SCALARS)
"""In the order in which they are written."""
_UNFINISHED = ".unfinished-"
_PROBE = ".writable"


@dataclass(frozen=True, slots=True)
class TrainerPosition:
    """How far training is: the policy version reached, the next offset to read of each partition of batches, and how
    many trajectories have been trained on the way.
    """

    version: PolicyVersion
    batch_offsets: tuple[int, ...]
    trajectories_trained: int


def write_checkpoint(
    root: StorageFolder, state: LearnerState, position: TrainerPosition, *, keep: int = 2, keep_every: int = 0
) -> StorageFolder:
    """Write `state` and `position` under `root` and return the new checkpoint's folder.

    The newest `keep` ≥ 1 checkpoints stay, and those whose version is a multiple of `keep_every` (0: none). Raises
    CheckpointError where the disk does not take it (then those that were there still are) or the version has a
    checkpoint already, ValueError for a `keep` below 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    place = root / str(position.version)
    try:
        if _is_whole(place):
            raise CheckpointError(f"there is a checkpoint of version {position.version} in {root} already")
        if isinstance(root, Path):
            _write_beside(root, state, position)
        else:
            _upload(root / str(position.version), state, position)
    except (OSError, SafetensorError) as error:
        left = _still_there(root)
        newest = f"the newest is still {left[-1].name}" if left else "there is none"
        space = f"; {describe_free_space(root)}" if isinstance(root, Path) and is_out_of_space(error) else ""
        reason = f"cannot write checkpoint {position.version} to {_whole(root)} ({newest}): {error}{space}"
        raise CheckpointError(reason) from error
    _prune(root, keep, keep_every)
    return place


def check_writable(root: StorageFolder) -> None:
    """Make `root`, and see that files can be written there. Raises CheckpointError."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / _PROBE).write_bytes(b"x")
        (root / _PROBE).unlink()
    except OSError as error:
        raise CheckpointError(f"no checkpoint could be written to {_whole(root)}: {error}") from error


def _whole(root: StorageFolder) -> StorageFolder:
    """`root` as it reads from everywhere."""
    return root.absolute() if isinstance(root, Path) else root


def _is_whole(folder: StorageFolder) -> bool:
    return (folder / _SCALARS).exists() if isinstance(folder, RemotePath) else folder.exists()


def _write_beside(root: Path, state: LearnerState, position: TrainerPosition) -> None:
    """Write the folder beside its place, then rename it."""
    unfinished = root / f"{_UNFINISHED}{position.version}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(f"{_UNFINISHED}*"):  # of a process that died writing; a run has one trainer
            shutil.rmtree(leftover, ignore_errors=leftover != unfinished)
        unfinished.mkdir()
        _write_files(unfinished, state, position)
        unfinished.rename(root / str(position.version))
        _sync(root)
    except (OSError, SafetensorError):
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _upload(place: RemotePath, state: LearnerState, position: TrainerPosition) -> None:
    """Upload the files one by one; with the last of them the checkpoint is there."""
    with TemporaryDirectory(prefix="laminar-checkpoint-") as scratch:
        _write_files(Path(scratch), state, position)
        for name in _FILES:
            (place / name).upload(Path(scratch) / name)


def _remove(folder: StorageFolder) -> None:
    if isinstance(folder, Path):
        shutil.rmtree(folder)
    else:
        (folder / _SCALARS).unlink()  # from here on it is none
        folder.remove_tree()


def _prune(root: StorageFolder, keep: int, keep_every: int) -> None:
    """Remove what is not to be kept. What cannot be removed stays: the checkpoints that count are written."""
    for old in _still_there(root)[:-keep]:
        if not keep_every or PolicyVersion.parse(old.name).number % keep_every:
            try:
                _remove(old)
            except OSError as error:
                log.warning("an old checkpoint is not removed: %s", error)


def _still_there(root: StorageFolder) -> list[StorageFolder]:
    try:
        return list_checkpoints(root)
    except OSError:
        return []


def read_checkpoint(folder: StorageFolder) -> tuple[LearnerState, TrainerPosition]:
    """The state and position in `folder`.

    Raises CheckpointError where something is missing, damaged or of another format.
    """
    try:
        scalars = _read_scalars(folder)
        with local_copy(folder, (_WEIGHTS, _TRAINER)) as local:
            for name in (_WEIGHTS, _TRAINER):
                if _digest(local / name) != scalars["blake3"][name]:
                    raise CheckpointError(f"{folder / name} is damaged: its BLAKE3 is not the recorded one")
            tensors = load_file(local / _TRAINER)
            state = LearnerState(
                weights=load_file(local / _WEIGHTS),
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


def read_position(folder: StorageFolder) -> TrainerPosition:
    """The position in `folder` alone, without its tensors. Raises CheckpointError as `read_checkpoint` does."""
    try:
        return _position(_read_scalars(folder))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot read the checkpoint {folder}: {error!r}") from error


def list_checkpoints(root: StorageFolder) -> list[StorageFolder]:
    """The complete checkpoints under `root`, oldest first; none where there is no such folder.

    Raises OSError where `root` cannot be read.
    """
    if isinstance(root, Path) and not root.is_dir():
        return []
    return [root / name for name in _versions(folder.name for folder in root.iterdir()) if _is_whole(root / name)]


def _versions(names: Iterable[str]) -> list[str]:
    """Those of `names` that are a checkpoint's, in the order of their versions."""
    found = []
    for name in names:
        try:
            found.append((PolicyVersion.parse(name), name))
        except ValueError:
            continue
    return [name for _, name in sorted(found)]


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


def _read_scalars(folder: StorageFolder) -> dict[str, Any]:
    scalars = json.loads((folder / _SCALARS).read_bytes())
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
