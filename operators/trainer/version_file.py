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
from pathlib import Path

import torch
import torch.distributed as dist

from infra.models.dtypes import tensor_specs
from infra.store.layout import Layout
from infra.store.names import is_store_file
from operators.trainer.learner_contract import FullWeights
from operators.trainer.ranks import Ranks
from operators.trainer.weight_parts import WeightPart

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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

    Raises what `write` raises, and RuntimeError for a part that is not within its tensor.
    """
    for part in weights.parts():
        if write is not None:
            write(part)
        if ranks.rank in remote:
            _send(part)
        elif ranks.rank == 0:
            for rank in remote:
                assert write is not None
                write(_receive(part, rank))
    ranks.maximum(0)  # all have written


def layout_of(weights: FullWeights) -> Layout:
    """The layout of a file with `weights`."""
    return Layout(tensor_specs(weights.specs()))


def _send(part: WeightPart) -> None:
    elements = part.elements.to(device="cpu", dtype=part.dtype)
    dist.send(torch.tensor([part.begin, len(elements)]), 0)
    if len(elements):
        dist.send(elements.contiguous().view(torch.uint8), 0)


def _receive(own: WeightPart, rank: int) -> WeightPart:
    """The part of `rank` of the same tensor as `own`. Raises RuntimeError for a part that is not within the tensor."""
    place = torch.zeros(2, dtype=torch.int64)
    dist.recv(place, rank)
    begin, count = place.tolist()
    total = sum(each.elements for each in own.ranges)
    if not 0 <= begin <= begin + count <= total:
        raise RuntimeError(f"rank {rank} sends elements {begin} to {begin + count} of a tensor that has {total}")
    elements = torch.empty(count, dtype=own.dtype)
    if count:
        dist.recv(elements.view(torch.uint8), rank)
    return WeightPart(own.ranges, begin, elements, own.dtype)


def _machine() -> str:
    return _BOOT_ID.read_text("ascii").strip() if _BOOT_ID.exists() else ""
