"""The file of a version that several ranks write.

Each rank of rank 0's machine writes its part of every tensor into the file, the others send theirs to rank 0. Nothing
is gathered: no rank receives what it does not write. A message has the parts of several tensors, about `GROUP_BYTES`.
A ValueError would say that a batch cannot be trained, so errors are RuntimeErrors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from infra.models.dtypes import tensor_specs
from infra.store.layout import Layout
from infra.store.names import is_store_file
from operators.trainer.learner_contract import FullWeights
from operators.trainer.ranks import Ranks
from operators.trainer.weight_parts import GROUP_BYTES, WeightPart, on_host, steps_of

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TOGETHER_BYTES = 256 << 20
"""Ranks that gather tensors, or of which some send their parts, wait for each other after so many bytes."""


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
    for step in steps_of(weights.parts(), min(_step_bytes(ranks), _TOGETHER_BYTES)):
        if write is not None:
            for part in step:
                write(part)
        if ranks.rank in remote:
            _send(step, None)
        elif ranks.rank == 0:
            assert write is not None
            _write_received(_begin_to_receive(step, remote, None), write)
        ahead += sum(part.total * part.dtype.itemsize for part in step)
        if remote and ahead >= _TOGETHER_BYTES:
            ranks.maximum(0)
            ahead = 0
    ranks.maximum(0)  # all have written


def send_parts(parts: Iterable[WeightPart], ranks: Ranks, group: dist.ProcessGroup) -> Iterator[None]:
    """Send `parts`, those of this rank, to rank 0 over `group`, message by message."""
    for step in steps_of(parts, _step_bytes(ranks)):
        _send(step, group)
        yield


def receive_parts(
    parts: Iterable[WeightPart],
    ranks: Ranks,
    group: dist.ProcessGroup,
    remote: Sequence[int],
    write: Callable[[WeightPart], None],
) -> Iterator[None]:
    """Write, on rank 0, what the `remote` ranks send over `group` of the tensors of `parts`, message by message.

    Raises RuntimeError for a part that is not within its tensor, and what `write` raises.
    """
    arrived = list[_Arriving]()
    for step in steps_of(parts, _step_bytes(ranks)):
        arriving = _begin_to_receive(step, remote, group)
        _write_received(arrived, write)  # while the next ones arrive
        arrived = arriving
        yield
    _write_received(arrived, write)


def gather_in_step(weights: FullWeights, ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    """The items of `weights`, which every rank takes, and rank 0 writes somewhere.

    Ranks that write nothing wait for rank 0 after some tensors: over NCCL they would queue all, whose time-outs begin
    then.
    """
    ahead = 0
    for name, tensor in weights.items():
        yield name, tensor
        ahead += tensor.nbytes
        if ahead >= _TOGETHER_BYTES:
            ranks.maximum(0)
            ahead = 0


def layout_of(weights: FullWeights) -> Layout:
    """The layout of a file with `weights`."""
    return Layout(tensor_specs(weights.specs()))


class _Arriving(NamedTuple):
    """The parts of a step that a rank sends: `work` is done when all have arrived."""

    parts: list[WeightPart]
    work: dist.Work


def _step_bytes(ranks: Ranks) -> int:
    """The bytes of a step's tensors of which each rank has about `GROUP_BYTES`."""
    return GROUP_BYTES * (ranks.shards or ranks.count)


def _send(step: Sequence[WeightPart], group: dist.ProcessGroup | None) -> None:
    dist.send(torch.tensor([(part.begin, len(part.elements)) for part in step]), 0, group)
    if any(len(part.elements) for part in step):
        dist.send(torch.cat([part.elements.to(part.dtype) for part in on_host(step)]).view(torch.uint8), 0, group)


def _begin_to_receive(
    step: Sequence[WeightPart], remote: Sequence[int], group: dist.ProcessGroup | None
) -> list[_Arriving]:
    """Begin to receive what the `remote` ranks have of the tensors of `step`, which are this rank's parts of them."""
    places = [torch.zeros(len(step), 2, dtype=torch.int64) for _ in remote]
    for receiving in [_receive(place, rank, group) for place, rank in zip(places, remote, strict=True)]:
        receiving.wait()
    arriving = []
    for place, rank in zip(places, remote, strict=True):
        for own, (begin, count) in zip(step, place.tolist(), strict=True):
            if not 0 <= begin <= (end := begin + count) <= own.total:
                raise RuntimeError(f"rank {rank} sends elements {begin} to {end} of a tensor that has {own.total}")
        begins, counts = place.T.tolist()
        if not any(counts):
            continue
        elements = torch.empty(sum(counts), dtype=step[0].dtype)
        each = zip(step, begins, elements.split(counts), strict=True)
        parts = [replace(own, begin=begin, elements=part) for own, begin, part in each]
        arriving.append(_Arriving(parts, _receive(elements.view(torch.uint8), rank, group)))
    return arriving


def _write_received(arriving: Sequence[_Arriving], write: Callable[[WeightPart], None]) -> None:
    for parts, work in arriving:
        work.wait()
        for part in parts:
            write(part)


def _receive(target: Tensor, rank: int, group: dist.ProcessGroup | None) -> dist.Work:
    receiving = dist.irecv(target, rank, group)
    assert receiving is not None  # this process is in the group
    return receiving


def _machine() -> str:
    return _BOOT_ID.read_text("ascii").strip() if _BOOT_ID.exists() else ""
