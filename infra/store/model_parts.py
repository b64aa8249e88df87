"""The parts of a model in a weight file: its layers, and the tensors outside of them, with the chunks that have each.

A machine that has received some parts can compute them before it has received the others. Transfers to such machines
follow the order of the computation (`chunk_orders`), so that the chunks received so far are whole, adjacent parts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from infra.store.layout import Layout
from schemas.records import WeightVersion

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d{1,5})\.")


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The chunks of each part: `ends` has the tensors outside of layers (embedding, last norm, output weights),
    `layers[i]` those of layer i. A chunk may be in several parts."""

    ends: frozenset[int]
    layers: tuple[frozenset[int], ...]

    def held(self, arrived: Collection[int]) -> HeldParts:
        """The parts of which all chunks are in `arrived`."""
        chunks = arrived if isinstance(arrived, set | frozenset) else set(arrived)
        layers = frozenset(layer for layer, needed in enumerate(self.layers) if needed <= chunks)
        return HeldParts(self.ends <= chunks, layers)


@dataclass(frozen=True, slots=True)
class HeldParts:
    """The parts that a machine has: whether it has `ends`, and the numbers of its `layers`."""

    ends: bool
    layers: frozenset[int]


def layer_of(name: str) -> int | None:
    """The layer of the tensor called `name`; None if it is outside of the layers."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def model_parts(manifest: WeightVersion) -> ModelParts:
    """The parts of the version that `manifest` describes.

    Raises ValueError if its tensors are not listed, or are not those of layers 0 to n.
    """
    if not manifest.tensors or manifest.chunk_bytes < 1:
        raise ValueError(f"the manifest of version {manifest.version} does not list its tensors and chunks")
    parts: dict[int | None, set[int]] = {None: {0}}  # the header is in the first chunk
    for name, (start, end) in Layout(manifest.tensors).tensor_ranges().items():
        if end > start:
            chunks = range(start // manifest.chunk_bytes, -(-end // manifest.chunk_bytes))
            parts.setdefault(layer_of(name), set()).update(chunks)
    ends = parts.pop(None)
    numbers = sorted(number for number in parts if number is not None)
    if not numbers or numbers != list(range(len(numbers))):
        raise ValueError(f"version {manifest.version} has layers {numbers[:8]}, expected 0, 1, 2 and so on")
    return ModelParts(frozenset(ends), tuple(frozenset(parts[number]) for number in numbers))


def chunk_orders(parts: ModelParts, chunks: int, groups: int) -> list[list[int]]:
    """An order of all `chunks` chunks for each of `groups` groups of machines: first a share of the parts, then the
    parts that follow, round and round.

    The shares are whole parts, as even as they allow: once each group has received the longest share, each part is
    whole at one of them. The first group's begins with the ends.
    """
    listed = [sorted(part) for part in (parts.ends, *parts.layers)]
    starts, known = [], set[int]()
    for part in listed:
        starts.append(len(known))
        known.update(part)
    orders = []
    for group in range(groups):
        _, first = min((abs(start - chunks * group // groups), place) for place, start in enumerate(starts))
        orders.append([*dict.fromkeys(chain(*listed[first:], *listed[:first], range(chunks)))])
    return orders


def runs_of(chunks: Iterable[int], most: int) -> tuple[int, ...]:
    """`chunks` as runs, first and end of each (end exclusive), flattened: the `most` longest, in order."""
    runs: list[list[int]] = []
    for chunk in sorted(chunks):
        if runs and runs[-1][1] == chunk:
            runs[-1][1] += 1
        else:
            runs.append([chunk, chunk + 1])
    kept = sorted(sorted(runs, key=lambda run: run[0] - run[1])[:most])
    return tuple(number for run in kept for number in run)


def chunks_in(runs: Sequence[int], most: int) -> set[int]:
    """The chunks below `most` in `runs`, as `runs_of` returns them."""
    pairs = zip(runs[::2], runs[1::2], strict=False)
    return {chunk for first, end in pairs for chunk in range(max(first, 0), min(end, most))}
