"""The files of a checkpoint: one safetensors file of each rank with its parts of the tensors, and one JSON manifest.

A file `rank-R-of-N.safetensors` holds, of every sharded tensor, the elements that rank R holds, flat and in order; rank
0's also has the tensors that are equal on all ranks. With several copies of the model only the ranks of the first one
have tensors in their files. `checkpoint.json` has every tensor's dtype and full shape, the
BLAKE3 and size of each file, and the position. It is written last, so a folder with it is complete. Any number of ranks
can read it: each reads the elements that it will hold.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from blake3 import blake3
from torch import Tensor
from torch.distributed.tensor import DTensor

from infra.models.checkpoint_list import MANIFEST
from infra.models.device_copies import host_parts
from infra.models.dtypes import DTYPES
from infra.models.local_part import local_part
from infra.models.stored_tensors import StoredTensors
from infra.storage import RangeReader, StorageFolder
from infra.store.layout import Layout
from operators.trainer.learner_state import LearnerState
from operators.trainer.persist import CheckpointError
from operators.trainer.ranks import Ranks
from schemas.records import PolicyVersion, TensorSpec

FORMAT = 2
_HASH_BYTES = 16 << 20


class RankLayout(NamedTuple):
    """The ranks that trained from batch number `since` on, as in the trainer's configuration."""

    since: int
    ranks: int
    shard_ranks: int
    context_ranks: int


@dataclass(frozen=True, slots=True)
class TrainerPosition:
    """The trainer's progress: the policy version reached, the next offset to read in each partition of the batches
    topic, the number of trajectories trained so far, and the ranks that have trained, the first ones first.
    """

    version: PolicyVersion
    batch_offsets: tuple[int, ...]
    trajectories_trained: int
    layouts: tuple[RankLayout, ...] = ()


@dataclass(frozen=True, slots=True)
class RankFile:
    """A rank's file, complete: its name, size and BLAKE3."""

    name: str
    bytes: int
    blake3: str


def file_name(rank: int, ranks: Ranks) -> str:
    """The name of the file of `rank`, one of `ranks`."""
    return f"rank-{rank}-of-{ranks.count}.safetensors"


def write_rank_file(folder: StorageFolder, state: LearnerState, ranks: Ranks) -> RankFile:
    """Write this rank's part of `state` to `folder`, durably, copying one tensor at a time. Raises OSError."""
    own = {
        name: local_part(tensor).elements
        for name, tensor in state.tensors().items()
        if (ranks.of_first_copy if isinstance(tensor, DTensor) else ranks.rank == 0)
    }
    layout = Layout([TensorSpec(name, DTYPES[part.dtype], (len(part),)) for name, part in own.items()])
    name, digest = file_name(ranks.rank, ranks), blake3(max_threads=blake3.AUTO)
    with _output(folder / name) as sink:
        for piece in _pieces(layout, own):
            digest.update(piece)
            sink.write(piece)
    return RankFile(name, layout.size, digest.hexdigest())


def write_manifest(
    folder: StorageFolder, state: LearnerState, position: TrainerPosition, files: Sequence[RankFile]
) -> None:
    """Write the manifest, which makes the folder with `files`, in rank order, a checkpoint. Raises OSError."""
    manifest = {
        "format": FORMAT,
        "version": str(position.version),
        "batch_offsets": position.batch_offsets,
        "trajectories_trained": position.trajectories_trained,
        "layouts": [each._asdict() for each in position.layouts],
        "updates": state.updates,
        "skipped_updates": state.skipped_updates,
        "files": [asdict(file) for file in files],
        "tensors": {name: [DTYPES[each.dtype], list(each.shape)] for name, each in state.tensors().items()},
    }
    with _output(folder / MANIFEST) as sink:
        sink.write(json.dumps(manifest).encode() + b"\n")


class StoredState:
    """The state in a checkpoint, during its `with` block: a `StateSource`. Raises CheckpointError."""

    def __init__(self, folder: StorageFolder) -> None:
        self.folder = folder
        manifest = read_manifest(folder)
        with reported(folder):
            self.position = manifest_position(manifest)
            self.updates, self.skipped_updates = int(manifest["updates"]), int(manifest["skipped_updates"])
            self._files = [RankFile(**file) for file in manifest["files"]]
            if any(Path(file.name).name != file.name for file in self._files):
                raise ValueError("the manifest names files outside of its folder")
            shards = {name: (dtype, tuple(shape)) for name, (dtype, shape) in manifest["tensors"].items()}
            self._tensors = StoredTensors([folder / file.name for file in self._files], shards)
        self.shapes = self._tensors.shapes

    def __enter__(self) -> StoredState:
        self._tensors.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._tensors.__exit__(*error)

    def read(self, name: str, begin: int, into: Tensor) -> None:
        with reported(self.folder):
            self._tensors.read(name, begin, into)

    def tensor(self, name: str) -> Tensor:
        """The whole tensor `name`."""
        with reported(self.folder):
            return self._tensors.tensor(name)

    def verify(self, ranks: Ranks) -> None:
        """Verify the files of which this rank takes care: all are, by all `ranks` together.

        Raises CheckpointError if one is damaged.
        """
        for file in self._files[ranks.rank :: ranks.count]:
            with reported(self.folder):
                if _digest(self.folder / file.name) != (file.bytes, file.blake3):
                    raise CheckpointError(
                        f"{self.folder / file.name} is damaged: its BLAKE3 differs from the recorded one"
                    )


def on_all_ranks(ranks: Ranks, action: Callable[[], None], what: str) -> None:
    """Do this rank's `action` with `what`. Raises CheckpointError on all `ranks` if that of any does."""
    reason: CheckpointError | None = None
    try:
        action()
    except CheckpointError as error:
        reason = error
    if ranks.maximum(reason is not None):
        raise reason or CheckpointError(f"{what} cannot be used: see the logs of the other ranks")


def read_manifest(folder: StorageFolder) -> dict[str, Any]:
    """The manifest of the checkpoint in `folder`. Raises CheckpointError."""
    with reported(folder):
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{folder} has checkpoint format {manifest['format']!r}, not {FORMAT}: only the Laminar that "
                "wrote it can read it"
            )
        return dict(manifest)


def manifest_position(manifest: Mapping[str, Any]) -> TrainerPosition:
    version = PolicyVersion.parse(manifest["version"])
    return TrainerPosition(
        version,
        tuple(manifest["batch_offsets"]),
        manifest["trajectories_trained"],
        tuple(RankLayout(**each) for each in manifest.get("layouts", ())),
    )


def file_names(manifest: Mapping[str, Any]) -> list[str]:
    """The files of the checkpoint with `manifest`, in the order in which a copy must write them."""
    return [*(file["name"] for file in manifest["files"]), MANIFEST]


@contextmanager
def reported(folder: StorageFolder) -> Iterator[None]:
    """Raise CheckpointError naming `folder` for whatever is wrong with its files."""
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"cannot read the checkpoint {folder}: {error!r}") from error


@contextmanager
def _output(file: StorageFolder) -> Iterator[BinaryIO]:
    """A new file, durable when the block ends. An upload that fails leaves at most a file that no manifest names."""
    if not isinstance(file, Path):
        with file.open_output() as sink:
            yield sink
        return
    with file.open("wb") as disk:
        yield disk
        disk.flush()
        os.fsync(disk.fileno())


def _pieces(layout: Layout, own: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield layout.header
    for spec in layout.specs:
        for piece in host_parts(own[spec.name], part_bytes=_HASH_BYTES):
            yield piece.view(torch.uint8).numpy().data


def _digest(file: StorageFolder) -> tuple[int, str]:
    digest, buffer = blake3(max_threads=blake3.AUTO), bytearray(_HASH_BYTES)
    with RangeReader(file) as reader:
        for begin in range(0, reader.size, _HASH_BYTES):
            part = memoryview(buffer)[: reader.size - begin]
            reader.read_into(begin, part)
            digest.update(part)
        return reader.size, digest.hexdigest()
