"""The file of a version that several ranks write.

Each rank of rank 0's machine writes its part of every tensor into the file, the others send theirs to rank 0. Nothing
is gathered: no rank receives what it does not write. A ValueError would say that a batch cannot be
trained, so errors are RuntimeErrors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from infra.models.dtypes import tensor_specs
from infra.store.layout import Layout
from infra.store.names import is_store_file
from operators.trainer.learner_contract import FullWeights
from operators.trainer.ranks import Ranks
from operators.trainer.weight_parts import WeightPart

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TOGETHER_BYTES = 256 << 20
"""Ranks of which some send their parts wait for each other after each group of tensors with so many bytes."""


def describe_file(path: Path) -> str:
    """A note by which another process finds the file `path`, if it has the same: a path may name another one there."""
    found = path.stat()
    note = {"path": str(path.absolute()), "machine": _machine(), "device": found.st_dev, "inode": found.st_ino}
    return json.dumps(note)


@contextmanager
def open_file(note: str, layout: Layout) -> Iterator[int | None]:
    """The file that `note` describes, open for writing; None if this process cannot write the same file, because it is
    on another machine or in a container with its own shared memory.

    Raises RuntimeError for a note that is invalid or of a file with other tensors than those of `layout`.
    """
    try:
        fields = json.loads(note)
        path, expected = Path(fields["path"]), (fields["machine"], fields["device"], fields["inode"])
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"rank 0's note of a version's file is invalid: {note[:200]!r}") from error
    if not is_store_file(path.name):
        raise RuntimeError(f"rank 0's note names {path}, which is no file of a weight store")
    with ExitStack() as closing:
        try:
            file = closing.enter_context(path.open("rb+", buffering=0))
        except OSError:
            file = None
        found = None if file is None else os.fstat(file.fileno())
        if file is None or found is None or (_machine(), found.st_dev, found.st_ino) != expected:
            yield None
            return
        if found.st_size != layout.size or file.read(len(layout.header)) != layout.header:
            raise RuntimeError(
                f"rank 0 publishes other tensors than this rank has ({found.st_size} bytes in {path}, {layout.size} "
                "here): start all ranks with the same model and configuration"
            )
        yield file.fileno()


def ranks_without_file(ranks: Ranks, write: Callable[[WeightPart], None] | None) -> list[int]:
    """The ranks whose `write`, which writes a part into the file, is None. A collective. Raises RuntimeError for 0."""
    remote = [rank for rank, lacks in enumerate(ranks.gather(torch.tensor([int(write is None)]))) if lacks]
    if 0 in remote:
        raise RuntimeError("rank 0 has no file to write")
    return remote


def write_parts(
    weights: FullWeights, ranks: Ranks, write: Callable[[WeightPart], None] | None, remote: Sequence[int]
) -> None:
    """Write the parts of all ranks, of which the `remote` ones send theirs to rank 0; every rank must call it.

    No rank waits for longer than it takes to send a few tensors: a whole file may take longer than the timeout of a
    collective. Raises what `write` raises, and RuntimeError for a part that is not within its tensor.
    """
    ahead = 0
    for part in weights.parts():
        if write is not None:
            write(part)
        if ranks.rank in remote:
            _send(part)
        elif ranks.rank == 0:
            assert write is not None
            _receive(part, remote, write)
        ahead += part.total * part.dtype.itemsize
        if remote and ahead >= _TOGETHER_BYTES:
            ranks.maximum(0)
            ahead = 0
    ranks.maximum(0)  # all have written


def layout_of(weights: FullWeights) -> Layout:
    """The layout of a file with `weights`."""
    return Layout(tensor_specs(weights.specs()))


def _send(part: WeightPart) -> None:
    elements = part.elements.to(device="cpu", dtype=part.dtype)
    dist.send(torch.tensor([part.begin, len(elements)]), 0)
    if len(elements):
        dist.send(elements.contiguous().view(torch.uint8), 0)


def _receive(own: WeightPart, remote: Sequence[int], write: Callable[[WeightPart], None]) -> None:
    """Write the parts of the tensor of `own` that the `remote` ranks send, all at once.

    Raises RuntimeError for a part that is not within the tensor.
    """
    places = [torch.zeros(2, dtype=torch.int64) for _ in remote]
    for receiving in [_begin_to_receive(place, rank) for place, rank in zip(places, remote, strict=True)]:
        receiving.wait()
    arriving = []
    for place, rank in zip(places, remote, strict=True):
        begin, count = place.tolist()
        if not 0 <= begin <= (end := begin + count) <= own.total:
            raise RuntimeError(f"rank {rank} sends elements {begin} to {end} of a tensor that has {own.total}")
        if count:
            part = replace(own, begin=begin, elements=torch.empty(count, dtype=own.dtype))
            arriving.append((part, _begin_to_receive(part.elements.view(torch.uint8), rank)))
    for part, receiving in arriving:
        receiving.wait()
        write(part)


def _begin_to_receive(target: Tensor, rank: int) -> dist.Work:
    receiving = dist.irecv(target, rank)
    assert receiving is not None  # this process is in the group
    return receiving


def _machine() -> str:
    return _BOOT_ID.read_text("ascii").strip() if _BOOT_ID.exists() else ""
