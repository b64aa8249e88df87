"""Checkpoints of the trainer: one folder with the trainer's whole state, written atomically and without pickle.

A folder is named by its policy version; `checkpoint_files.py` has its files. On a disk the folder is written under a
temporary name, synced, then renamed. In an object store the manifest is uploaded last; a folder without it is not a
checkpoint. So every listed checkpoint is complete.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.files import describe_free_space, is_out_of_space, sync_path
from infra.machine import machine_name
from infra.models.checkpoint_list import MANIFEST, is_complete, list_checkpoints, list_unfinished
from infra.storage import RangeReader, StorageFolder, probe_writable
from operators.io.elements import PartitionKey
from operators.trainer.checkpoint_files import (
    RankFile,
    TrainerPosition,
    file_names,
    manifest_position,
    read_manifest,
    write_manifest,
    write_rank_file,
)
from operators.trainer.learner_state import LearnerState
from operators.trainer.persist import CheckpointError, persist
from operators.trainer.ranks import ALONE, Ranks
from schemas.records import PolicyVersion
from schemas.topics import BATCHES

log = logging.getLogger(__name__)

_UNFINISHED = ".unfinished-"
_MOUNT = (
    "mount one disk there on the machines of all ranks; a new run can use an object store (trainer.checkpoint_folder)"
)


@dataclass(frozen=True)
class CheckpointPositions:
    """Where a rank resumes reading its `partitions`: at the newest checkpoint, regardless of committed offsets.

    The checkpoint is read in up to `tries` attempts.
    """

    checkpoints: StorageFolder
    partitions: Sequence[int] = (0,)
    tries: int = 1

    def __call__(self) -> dict[PartitionKey, int]:
        found = persist(lambda: find_checkpoints(self.checkpoints), self.tries)
        offsets = persist(lambda: read_position(found[-1]).batch_offsets, self.tries) if found else ()
        return {PartitionKey(BATCHES.short_name, p): offsets[p] if found else 0 for p in self.partitions}


def write_checkpoint(
    root: StorageFolder,
    state: LearnerState,
    position: TrainerPosition,
    *,
    keep: int = 2,
    keep_every: int = 0,
    retry: Callable[[Callable[[], Any]], Any] = lambda write: write(),
) -> StorageFolder:
    """Write `state`, of a single rank, and `position` under `root`, as the two functions below do, and return the new
    checkpoint's folder. `retry` calls each of the two, once or more often. A write that fails leaves nothing.
    """
    options = {"keep": keep, "keep_every": keep_every}
    try:
        files = [retry(lambda: write_part(root, state, position, ALONE))]
        folder: StorageFolder = retry(lambda: complete_checkpoint(root, state, position, files, **options))
        return folder
    except CheckpointError:
        if isinstance(unfinished := _unfinished(root, position), Path):
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def write_part(root: StorageFolder, state: LearnerState, position: TrainerPosition, ranks: Ranks) -> RankFile:
    """Write this rank's file of the checkpoint of `state` and `position` under `root`.

    Raises CheckpointError if the write fails (existing checkpoints are then unchanged) or the version already has a
    checkpoint.
    """
    with _explained(root, position):
        if is_complete(root / str(position.version)):
            raise _exists_already(root, position)
        unfinished = _unfinished(root, position)
        unfinished.mkdir(parents=True, exist_ok=True)
        return write_rank_file(unfinished, state, ranks)


def complete_checkpoint(
    root: StorageFolder,
    state: LearnerState,
    position: TrainerPosition,
    files: Sequence[RankFile],
    *,
    keep: int = 2,
    keep_every: int = 0,
) -> StorageFolder:
    """Make the `files` of all ranks, in rank order, a checkpoint, and return its folder.

    The newest `keep` ≥ 1 checkpoints are kept, and those whose version is a multiple of `keep_every` (0: none). Raises
    CheckpointError if the write fails, the file of another rank is not there or the version has another checkpoint;
    ValueError for a `keep` below 1. After a failed write it can be called again: storage may complete a write, and then
    report an error.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    folder, unfinished = root / str(position.version), _unfinished(root, position)
    with _explained(root, position):
        if not is_complete(folder):
            _check_files(unfinished, files[1:])  # rank 0, which is this one, has written the first
            write_manifest(unfinished, state, position, files)
            if isinstance(unfinished, Path):
                sync_path(unfinished)
                unfinished.rename(str(folder))
        elif not _is_same(folder, position, files):
            raise _exists_already(root, position)
        if isinstance(root, Path):
            sync_path(root)
    _remove_unfinished(root, position.version)
    _prune(root, keep, keep_every)
    return folder


def _is_same(folder: StorageFolder, position: TrainerPosition, files: Sequence[RankFile]) -> bool:
    """Whether the checkpoint in `folder` has this `position` and these `files`. Raises CheckpointError."""
    manifest = read_manifest(folder)
    return (manifest_position(manifest), manifest["files"]) == (position, [asdict(file) for file in files])


def _exists_already(root: StorageFolder, position: TrainerPosition) -> CheckpointError:
    return CheckpointError(f"{root} already has a checkpoint of version {position.version}")


def _check_files(folder: StorageFolder, files: Sequence[RankFile]) -> None:
    """Raise CheckpointError unless `folder` has all `files`: other ranks may have written to disks of their own."""
    for file in files:
        try:
            found = RangeReader(folder / file.name).size
        except FileNotFoundError:
            found = 0
        if found != file.bytes:
            raise CheckpointError(
                f"{_absolute(folder / file.name)} has {found} of the {file.bytes} bytes that its rank has written: "
                f"{_MOUNT}"
            )


def _remove_unfinished(root: StorageFolder, before: PolicyVersion) -> None:
    """Remove what processes that were killed have left of checkpoints. A failure is only logged.

    A rank may have written its part of a version after `before` already.
    """
    try:
        if isinstance(root, Path):
            for leftover in root.glob(f"{_UNFINISHED}*"):  # a run has one trainer
                if not _is_newer(leftover, before):
                    shutil.rmtree(leftover, ignore_errors=True)
            return
        for folder in list_unfinished(root):
            if PolicyVersion.parse(folder.name) < before:
                folder.remove_tree()
    except OSError as error:
        log.warning("cannot remove the parts of an unfinished checkpoint: %s", error)


def _is_newer(unfinished: Path, version: PolicyVersion) -> bool:
    """Whether `unfinished` is of a version after `version`: another rank may have written its part of it already."""
    try:
        found = PolicyVersion.parse(unfinished.name.removeprefix(_UNFINISHED))
    except ValueError:
        return False
    return found > version


def copy_checkpoint(source: StorageFolder, target: Path) -> None:
    """Copy the checkpoint `source` to the new folder `target` atomically. Raises CheckpointError.

    On one file system the files are linked: no checkpoint's file is ever changed, and the copy takes no space.
    """
    position = manifest_position(manifest := read_manifest(source))
    with _explained(target.parent, position):
        unfinished = target.parent / f"{_UNFINISHED}{target.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for name in file_names(manifest):
            if not isinstance(source, Path):
                (source / name).download(unfinished / name)
                continue
            try:
                os.link(source / name, unfinished / name)
            except OSError:  # another file system, or one without links
                shutil.copyfile(source / name, unfinished / name)
        unfinished.rename(target)
        sync_path(target.parent)


def find_checkpoints(root: StorageFolder) -> list[StorageFolder]:
    """The complete checkpoints under `root`, oldest first. Raises CheckpointError if it cannot be read."""
    try:
        return list_checkpoints(root)
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {_absolute(root)} cannot be listed: {error}") from error


def check_writable(root: StorageFolder, rank: int = 0) -> None:
    """Create `root` and verify that `rank`, this one, can write files there. Raises CheckpointError."""
    with _explained_folder(root):
        probe_writable(root, f".writable-{rank}")


def write_mark(root: StorageFolder, start: int) -> None:
    """Write, on rank 0, the file by which the other ranks of `start` recognise its folder. Raises CheckpointError."""
    with _explained_folder(root):
        root.mkdir(parents=True, exist_ok=True)
        _mark(root, start).write_bytes(b"")


def check_mark(root: StorageFolder, start: int) -> None:
    """Raise CheckpointError unless `root` is the folder in which rank 0 has written the mark of `start`."""
    with _explained_folder(root):
        found = _mark(root, start).exists()
    if not found:
        raise CheckpointError(
            f"{_absolute(root)} on machine {machine_name()} is another folder than that of rank 0: {_MOUNT}"
        )


def remove_mark(root: StorageFolder, start: int) -> None:
    """Remove the mark of `start`, on rank 0. Raises CheckpointError."""
    with _explained_folder(root):
        _mark(root, start).unlink()


def _mark(root: StorageFolder, start: int) -> StorageFolder:
    return root / f".start-{start}"


@contextmanager
def _explained_folder(root: StorageFolder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"checkpoints cannot be written to {_absolute(root)} on machine {machine_name()}: {error} (see "
            "trainer.checkpoint_folder)"
        ) from error


def read_position(folder: StorageFolder) -> TrainerPosition:
    """The position in `folder`; tensors are not read. Raises CheckpointError as `StoredState` does."""
    try:
        return manifest_position(read_manifest(folder))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot read the checkpoint {folder}: {error!r}") from error


@contextmanager
def _explained(root: StorageFolder, position: TrainerPosition) -> Iterator[None]:
    """Raise CheckpointError for a failed write under `root`, with what remains there."""
    try:
        yield
    except OSError as error:
        existing = _existing(root)
        newest = f"the newest is still {existing[-1].name}" if existing else "there are no others"
        space = f"; {describe_free_space(root)}" if isinstance(root, Path) and is_out_of_space(error) else ""
        reason = f"cannot write checkpoint {position.version} to {_absolute(root)} ({newest}): {error}{space}"
        raise CheckpointError(reason) from error


def _unfinished(root: StorageFolder, position: TrainerPosition) -> StorageFolder:
    """The folder in which the checkpoint is written: in an object store, which cannot rename one, its final folder."""
    return root / (f"{_UNFINISHED}{position.version}" if isinstance(root, Path) else str(position.version))


def _absolute(root: StorageFolder) -> StorageFolder:
    """`root` as an absolute path or URI."""
    return root.absolute() if isinstance(root, Path) else root


def _remove(folder: StorageFolder) -> None:
    if isinstance(folder, Path):
        shutil.rmtree(folder)
    else:
        (folder / MANIFEST).unlink()  # the folder no longer counts as a checkpoint
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
