"""From members to micro-batches: sequences laid end to end, in parts of bounded size, as many for every rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from operators.experience.members import Member
from schemas.columns import flags, floats, integers, token_ids
from schemas.identity import trajectory_id
from schemas.records import MicroBatch


def split_by_tokens(lengths: Sequence[int], budget: int) -> Iterator[range]:
    """Consecutive ranges of sequences with at most `budget` tokens each; a longer sequence is alone in its range."""
    start = total = 0
    for index, length in enumerate(lengths):
        if index > start and total + length > budget:
            yield range(start, index)
            start, total = index, 0
        total += length
    if start < len(lengths):
        yield range(start, len(lengths))


def balance(loads: Sequence[int], ranks: int) -> list[int]:
    """The rank of each load: the longest first, each to the rank that has the least so far (Graham's LPT rule)."""
    ranking = [0] * len(loads)
    heap = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(loads)), key=lambda index: (-loads[index], index)):
        total, rank = heapq.heappop(heap)
        ranking[index] = rank
        heapq.heappush(heap, (total + loads[index], rank))
    return ranking


def pack(batch: int, members: Sequence[Member], staleness: Sequence[int], budget: int, ranks: int) -> list[MicroBatch]:
    """Global batch number `batch` as micro-batches of at most `budget` tokens, as many for each of `ranks` ranks.

    Members of a group stand together, and stay on one rank. `staleness` is aligned with `members`. Every part says how
    many its rank has, so a reader knows when the batch is whole; ranks with less work have empty ones at the end.
    """
    shares = _shares(members, ranks)
    ranges = [list(split_by_tokens([members[i].length for i in share], budget)) for share in shares]
    count = max(map(len, ranges))
    return [
        _micro_batch(batch, index, count, rank, [members[i] for i in part], [staleness[i] for i in part])
        for rank, share in enumerate(shares)
        for index, part in enumerate(
            [share[r.start : r.stop] for r in ranges[rank]] + [[]] * (count - len(ranges[rank]))
        )
    ]


def _shares(members: Sequence[Member], ranks: int) -> list[list[int]]:
    """The indices of each rank's members, in their order."""
    if ranks == 1:
        return [list(range(len(members)))]
    groups = [list(group) for _, group in groupby(range(len(members)), key=lambda index: members[index].number)]
    ranking = balance([sum(members[index].length for index in group) for group in groups], ranks)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for group, rank in zip(groups, ranking, strict=True):
        shares[rank] += group
    return shares


def _micro_batch(
    batch: int, index: int, count: int, rank: int, members: Sequence[Member], staleness: Sequence[int]
) -> MicroBatch:
    prompts, responses, logprobs, masks = _gather(members)
    lengths = np.array([member.length for member in members], np.int64)
    prompt_lengths = lengths - np.array([member.tokens for member in members], np.int64)
    in_response = _alternating(prompt_lengths, lengths - prompt_lengths)
    return MicroBatch(
        batch=batch,
        index=index,
        count=count,
        rank=rank,
        token_ids=token_ids(_laid_out(in_response, responses, np.int32, prompts)),
        logprobs=floats(_laid_out(in_response, logprobs, np.float32)),
        loss_mask=flags(_laid_out(in_response, masks, np.bool_)),
        lengths=integers(lengths),
        prompt_lengths=integers(prompt_lengths),
        rewards=floats([member.reward for member in members]),
        temperatures=floats([member.temperature for member in members]),
        trajectory_ids=tuple([trajectory_id(m.purpose, m.number, m.member) for m in members]),
        version_epochs=integers([member.version.epoch for member in members if member.version]),
        version_numbers=integers([member.version.number for member in members if member.version]),
        staleness=integers(staleness),
        lineage_partitions=integers([member.partition for member in members]),
        lineage_offsets=integers([member.offset for member in members]),
    )


def _gather(members: Sequence[Member]) -> list[np.ndarray]:
    """Prompt tokens, response tokens, logprobs and masks of `members`, each end to end.

    Neighbours that are neighbours on their shelf, too, are taken in one.
    """
    found: list[list[np.ndarray]] = [[], [], [], []]
    first = 0
    for last in range(1, len(members) + 1):
        before = members[last - 1]
        if last < len(members) and members[last].shelf is before.shelf and members[last].row == before.row + 1:
            continue
        shelf, start, stop = before.shelf, members[first].row, before.row + 1
        for parts, column in zip(
            found, (shelf.prompts, shelf.responses, shelf.logprobs, shelf.loss_masks), strict=True
        ):
            parts.append(column.between(start, stop))
        first = last
    kinds = (np.int32, np.int32, np.float32, np.bool_)
    return [np.concatenate(parts) if parts else np.empty(0, kind) for parts, kind in zip(found, kinds, strict=True)]


def _alternating(off: np.ndarray, on: np.ndarray) -> np.ndarray:
    """bool[sum]: off[0] times False, on[0] times True, off[1] times False and so on."""
    counts = np.stack([off, on], axis=1).ravel()
    return np.repeat(np.tile(np.array([False, True]), len(off)), counts)


def _laid_out(here: np.ndarray, values: np.ndarray, kind: type, others: np.ndarray | None = None) -> np.ndarray:
    """`values` where `here` is True, and `others` (nothing: zeros) elsewhere."""
    laid: np.ndarray = np.zeros(len(here), kind) if others is None else np.empty(len(here), kind)
    laid[here] = values
    if others is not None:
        laid[~here] = others
    return laid
