"""Transfer schedules: chain, tree, binomial pipeline and their k-way form. Pure functions.

Nodes are numbered from 0; a schedule is a sequence of steps, in each of which a node sends at most one block and
receives at most one (unless the number of nodes is not a power of two, see `binomial`). The transport pulls in this
order, and the simulation adds transfer times. Source: λScale (2502.09922) §4; closed form of the binomial pipeline:
RDMC (Behrens et al., DSN 2018) §4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np


class TransferStep(NamedTuple):
    """The transfers of one step: `sources[i]` sends `blocks[i]` to `receivers[i]`. int64[transfers] each."""

    sources: np.ndarray
    receivers: np.ndarray
    blocks: np.ndarray


class Pull(NamedTuple):
    """A block that a node pulls, its source node, and the step of the schedule."""

    block: int
    source: int
    step: int = 0


def chain(nodes: int, blocks: int) -> Iterator[TransferStep]:
    """Node 0 sends to 1, which sends to 2, and so on: blocks + nodes − 2 steps."""
    hops = np.arange(nodes - 1)
    for step in range(blocks + nodes - 2 if nodes > 1 else 0):
        sending = hops[max(0, step - blocks + 1) : step + 1]
        yield TransferStep(sending, sending + 1, step - sending)


def tree(nodes: int, blocks: int) -> Iterator[TransferStep]:
    """A binomial tree of whole copies: each complete node sends all to an empty one; blocks · ⌈log2 nodes⌉ steps."""
    holders = 1
    while holders < nodes:
        sources = np.arange(min(holders, nodes - holders))
        for block in range(blocks):
            yield TransferStep(sources, sources + holders, np.full(len(sources), block))
        holders *= 2


def binomial(nodes: int, blocks: int) -> Iterator[TransferStep]:
    """A pipeline of blocks along the dimensions of a hypercube: blocks + ⌈log2 nodes⌉ − 1 steps.

    If `nodes` is not a power of two, some nodes occupy two corners of the next larger cube and have the blocks of
    both: no node is sent a block twice, but such a node may move two blocks in a step.
    """
    if nodes < 2:
        return
    dimensions = (nodes - 1).bit_length()
    corners = np.arange(1 << dimensions)
    node = np.where(corners < nodes, corners, corners - (1 << dimensions >> 1))
    has = None if nodes == len(corners) else np.zeros((nodes, blocks), bool)
    if has is not None:
        has[0] = True
    for step in range(blocks + dimensions - 1):
        dimension = step % dimensions
        rotated = (corners >> dimension) | ((corners << (dimensions - dimension)) & (len(corners) - 1))
        lowest = np.bitwise_count((rotated & -rotated) - 1).astype(np.int64)  # trailing zeros
        block = np.where(rotated == 0, step, step - dimensions + lowest)
        sends = (rotated != 1) & (block >= 0)
        made = TransferStep(
            node[sends], node[(corners ^ (1 << dimension))[sends]], np.minimum(block, blocks - 1)[sends]
        )
        yield from [made] if has is None else _without_duplicates(made, has)


SCHEDULES: Mapping[str, Callable[[int, int], Iterator[TransferStep]]] = {
    "chain": chain,
    "tree": tree,
    "binomial": binomial,
}


def k_way(
    schedule: str, sources: int, nodes: int, blocks: int, orders: Sequence[Sequence[int]] | None = None
) -> Iterator[TransferStep]:
    """Nodes 0 … `sources` − 1 are complete, the others empty: each source serves a group, with its order of the blocks.

    There are as many groups as sources, or receivers if those are fewer. `orders` has the order of each group; without
    it they begin at even distances. After about blocks / groups steps the groups then hold every block, which is the
    first complete copy across nodes; each group continues to its end. With fewer receivers than sources each receiver
    has several sources and pulls from them in turns, in parallel. Groups are independent, so their steps are merged.
    """
    receivers = nodes - sources
    if receivers < 1:
        return
    count = min(sources, receivers)
    ordered = [
        np.roll(np.arange(blocks), -(group * blocks // count)) if orders is None else np.asarray(orders[group])
        for group in range(count)
    ]
    if receivers < sources:
        yield from _striped(sources, ordered)
        return
    groups = [np.array([first, *range(sources + first, nodes, sources)]) for first in range(sources)]
    running = [SCHEDULES[schedule](len(group), blocks) for group in groups]
    while True:
        parts = []
        for index, (group, steps) in enumerate(zip(groups, running, strict=True)):
            if (step := next(steps, None)) is not None:
                of_group = ordered[index][step.blocks]
                parts.append(TransferStep(group[step.sources], group[step.receivers], of_group))
        if not parts:
            return
        yield TransferStep(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def pulls(steps: Iterator[TransferStep], node: int) -> list[Pull]:
    """The pulls of `node`, in order."""
    found: list[Pull] = []
    for number, step in enumerate(steps):
        for place in np.flatnonzero(step.receivers == node):
            found.append(Pull(int(step.blocks[place]), int(step.sources[place]), number))
    return found


def pulls_of(
    schedule: str,
    sources: Sequence[int],
    receivers: Sequence[int],
    node: int,
    blocks: int,
    orders: Sequence[Sequence[int]] | None = None,
) -> list[Pull]:
    """The pulls of `node`, one of `receivers`, when those get `blocks` blocks from `sources`; ids are the caller's.

    `orders` as in `k_way`. Callers give a chain or a tree one source; the binomial pipeline uses all sources. Raises
    ValueError for an unknown schedule or a node that receives nothing.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}, it must be one of {', '.join(SCHEDULES)}")
    ids = [*sources, *receivers]
    place = ids.index(node)
    if place < len(sources):
        raise ValueError(f"node {node} is a source: it pulls nothing")
    if (
        schedule == "chain" and len(sources) == 1 and orders is None
    ):  # the common case, without iterating over the steps of all nodes
        return [Pull(block, ids[place - 1], block + place - 1) for block in range(blocks)]
    steps = k_way(schedule, len(sources), len(ids), blocks, orders)
    return [Pull(block, ids[source], step) for block, source, step in pulls(steps, place)]


def _striped(sources: int, ordered: Sequence[np.ndarray]) -> Iterator[TransferStep]:
    """Receiver r, of as many as there are orders, pulls its order from sources r, r + receivers, … in turns.

    A receiver gets several blocks in a step, limited by its link.
    """
    plans = []
    for receiver, order in enumerate(ordered):
        mine = range(receiver, sources, len(ordered))
        plans += [(source, sources + receiver, order[part :: len(mine)]) for part, source in enumerate(mine)]
    for step in range(max(len(stripe) for *_, stripe in plans)):
        now = [(source, to, stripe[step]) for source, to, stripe in plans if step < len(stripe)]
        yield TransferStep(*(np.array(column) for column in zip(*now, strict=True)))


def _without_duplicates(step: TransferStep, has: np.ndarray) -> Iterator[TransferStep]:
    """`step` without blocks that its receivers have or get twice; updates `has`, bool[nodes, blocks]."""
    kept = [
        place
        for place, (_, receiver, block) in enumerate(zip(*step, strict=True))
        if not has[receiver, block] and not has.__setitem__((receiver, block), True)
    ]
    if kept:
        yield TransferStep(*(column[kept] for column in step))
