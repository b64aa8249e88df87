"""Checkpoints of the trainer: one folder with the trainer's whole state, written atomically and without pickle.

A folder is named by its policy version and holds `weights.safetensors` (as rollouts load them), `trainer.safetensors`
(optimizer moments, the critic, LoRA's adapters, random state) and `checkpoint.json` (the rest, and the BLAKE3 of both
files). On a disk the folder is written under a temporary name, synced, then renamed. To an object store the files are
uploaded, checkpoint.json last; a folder without it is not a checkpoint. So every listed checkpoint is complete.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from infra.files import describe_free_space, is_out_of_space, sync_path
from infra.storage import RemotePath, StorageFolder, local_copy
from operators.io.elements import PartitionKey
from operators.trainer.learner import LearnerState
from operators.trainer.persist import CheckpointError
from schemas.records import PolicyVersion
from schemas.topics import BATCHES

log = logging.getLogger(__name__)

_FORMAT = 1
_WEIGHTS, _TRAINER, _SCALARS = "weights.safetensors", "trainer.safetensors", "checkpoint.json"
_FILES = (_WEIGHTS, _TRAINER, _SCALARS)
"""In the order in which they are uploaded."""
_UNFINISHED = ".unfinished-"
_PROBE = ".writable"


@dataclass(frozen=True, slots=True)
class TrainerPosition:
    """The trainer's progress: the policy version reached, the next offset to read in each partition of the batches
    topic, and the number of trajectories trained so far.
    """

    version: PolicyVersion
    batch_offsets: tuple[int, ...]
    trajectories_trained: int


@dataclass(frozen=True)
class CheckpointPositions:
    """Where a rank resumes reading its `partitions`: at the newest checkpoint, regardless of committed offsets."""

    checkpoints: StorageFolder
    partitions: Sequence[int] = (0,)

    def __call__(self) -> dict[PartitionKey, int]:
        found = list_checkpoints(self.checkpoints)
        offsets = read_position(found[-1]).batch_offsets if found else ()
        return {PartitionKey(BATCHES.short_name, p): offsets[p] if found else 0 for p in self.partitions}


def write_checkpoint(
    root: StorageFolder, state: LearnerState, position: TrainerPosition, *, keep: int = 2, keep_every: int = 0
) -> StorageFolder:
    """Write `state` and `position` under `root` and return the new checkpoint's folder.

    The newest `keep` ≥ 1 checkpoints are kept, and those whose version is a multiple of `keep_every` (0: none). Raises
    CheckpointError if the write fails (existing checkpoints are then unchanged) or the version already has a
    checkpoint, ValueError for a `keep` below 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    folder = root / str(position.version)
    try:
        if _is_complete(folder):
            raise CheckpointError(f"{root} already has a checkpoint of version {position.version}")
        if isinstance(root, Path):
            _write_to_disk(root, state, position)
        else:
            _upload(root / str(position.version), state, position)
    except (OSError, SafetensorError) as error:
        existing = _existing(root)
        newest = f"the newest is still {existing[-1].name}" if existing else "there are no others"
        space = f"; {describe_free_space(root)}" if isinstance(root, Path) and is_out_of_space(error) else ""
        reason = f"cannot write checkpoint {position.version} to {_absolute(root)} ({newest}): {error}{space}"
        raise CheckpointError(reason) from error
    _prune(root, keep, keep_every)
    return folder


def check_writable(root: StorageFolder) -> None:
    """Create `root` and verify that files can be written there. Raises CheckpointError."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / _PROBE).write_bytes(b"x")
        (root / _PROBE).unlink()
    except OSError as error:
        raise CheckpointError(f"checkpoints cannot be written to {_absolute(root)}: {error}") from error


def _absolute(root: StorageFolder) -> StorageFolder:
    """`root` as an absolute path or URI."""
    return root.absolute() if isinstance(root, Path) else root


def _is_complete(folder: StorageFolder) -> bool:
    return (folder / _SCALARS).exists() if isinstance(folder, RemotePath) else folder.exists()


def _write_to_disk(root: Path, state: LearnerState, position: TrainerPosition) -> None:
    """Write the folder under a temporary name, then rename it."""
    unfinished = root / f"{_UNFINISHED}{position.version}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(f"{_UNFINISHED}*"):  # from a process killed while writing; a run has one trainer
            shutil.rmtree(leftover, ignore_errors=leftover != unfinished)
        unfinished.mkdir()
        _write_files(unfinished, state, position)
        unfinished.rename(root / str(position.version))
        sync_path(root)
    except (OSError, SafetensorError):
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _upload(folder: RemotePath, state: LearnerState, position: TrainerPosition) -> None:
    """Upload the files one by one; the last one completes the checkpoint."""
    with TemporaryDirectory(prefix="laminar-checkpoint-") as scratch:
        _write_files(Path(scratch), state, position)
        for name in _FILES:
            (folder / name).upload(Path(scratch) / name)


def _remove(folder: StorageFolder) -> None:
    if isinstance(folder, Path):
        shutil.rmtree(folder)
    else:
        (folder / _SCALARS).unlink()  # the folder no longer counts as a checkpoint
        folder.remove_tree()


def _prune(root: StorageFolder, keep: int, keep_every: int) -> None:
    """Remove expired checkpoints. A failure is only logged: the checkpoints to keep are already written."""
    for old in _existing(root)[:-keep]:
        if not keep_every or PolicyVersion.parse(old.name).number % keep_every:
            try:
                _remove(old)
            except OSError as error:
                log.warning("cannot remove an expired checkpoint: %s", error)


def _existing(root: StorageFolder) -> list[StorageFolder]:
    try:
        return list_checkpoints(root)
    except OSError:
        return []


def read_checkpoint(folder: StorageFolder) -> tuple[LearnerState, TrainerPosition]:
    """The state and position in `folder`.

    Raises CheckpointError if something is missing, damaged or of another format.
    """
    try:
        scalars = _read_scalars(folder)
        with local_copy(folder, (_WEIGHTS, _TRAINER)) as local:
            for name in (_WEIGHTS, _TRAINER):
                if _digest(local / name) != scalars["blake3"][name]:
                    raise CheckpointError(f"{folder / name} is damaged: its BLAKE3 differs from the recorded one")
            tensors = load_file(local / _TRAINER)
            state = LearnerState(
                weights=load_file(local / _WEIGHTS),
                moments=_with_prefix("moments.", tensors),
                random_state=tensors["random_state"],
                updates=scalars["updates"],
                skipped_updates=scalars["skipped_updates"],
                critic_weights=_with_prefix("critic.weights.", tensors),
                critic_moments=_with_prefix("critic.moments.", tensors),
                adapters=_with_prefix("adapters.", tensors),
            )
        return state, _position(scalars)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot read the checkpoint {folder}: {error!r}") from error


def read_position(folder: StorageFolder) -> TrainerPosition:
    """The position in `folder`; tensors are not read. Raises CheckpointError as `read_checkpoint` does."""
    try:
        return _position(_read_scalars(folder))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot read the checkpoint {folder}: {error!r}") from error


def list_checkpoints(root: StorageFolder) -> list[StorageFolder]:
    """The complete checkpoints under `root`, oldest first; none if `root` does not exist.

    Raises OSError if `root` cannot be read.
    """
    if isinstance(root, Path) and not root.is_dir():
        return []
    return [root / name for name in _versions(folder.name for folder in root.iterdir()) if _is_complete(root / name)]


def _versions(names: Iterable[str]) -> list[str]:
    """The `names` that are policy versions, in the order of versions."""
    found = []
    for name in names:
        try:
            found.append((PolicyVersion.parse(name), name))
        except ValueError:
            continue
    return [name for _, name in sorted(found)]


def _write_files(folder: Path, state: LearnerState, position: TrainerPosition) -> None:
    save_file(_on_host("", state.weights), folder / _WEIGHTS, metadata={"format": "pt"})
    tensors = {
        **_on_host("moments.", state.moments),
        **_on_host("critic.weights.", state.critic_weights),
        **_on_host("critic.moments.", state.critic_moments),
        **_on_host("adapters.", state.adapters),
        "random_state": state.random_state,
    }
    save_file(tensors, folder / _TRAINER)
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
        sync_path(folder / name)
    sync_path(folder)


def _on_host(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _read_scalars(folder: StorageFolder) -> dict[str, Any]:
    scalars = json.loads((folder / _SCALARS).read_bytes())
    if scalars["format"] != _FORMAT:
        raise CheckpointError(f"{folder} has checkpoint format {scalars['format']!r}, not {_FORMAT}")
    return dict(scalars)


def _position(scalars: Mapping[str, Any]) -> TrainerPosition:
    version = PolicyVersion.parse(scalars["version"])
    return TrainerPosition(version, tuple(scalars["batch_offsets"]), scalars["trajectories_trained"])


def _digest(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
