"""From members to micro-batches: sequences laid end to end, in parts of bounded size, as many for every rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import sub

import numpy as np

from operators.experience.members import GroupMember, RowRun, gathered, runs_of
from schemas.arrow import arrow_schema
from schemas.block import Block
from schemas.columns import one_list
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


def pack(
    batch: int, members: Sequence[GroupMember], staleness: np.ndarray, budget: int, ranks: int
) -> list[list[Block]]:
    """Global batch number `batch` as micro-batches of at most `budget` tokens, as many for each of `ranks` ranks.

    By rank, each a block of one MicroBatch. Members of a group stand together, and stay on one rank. `staleness`,
    int64, is aligned with `members`. Every part says how many its rank has, so a reader knows when the batch is whole;
    ranks with less work have empty ones at the end. A batch without members has one for each.
    """
    lengths = gathered(list(runs_of(members)), "lengths").tolist()
    shares = _shares(members, lengths, ranks)
    ranges = [list(split_by_tokens([lengths[i] for i in share], budget)) for share in shares]
    count = max(1, *map(len, ranges))
    return [
        [
            _micro_batch((batch, index, count, rank), [members[i] for i in part], staleness[part])
            for index, part in enumerate(
                [share[r.start : r.stop] for r in ranges[rank]] + [[]] * (count - len(ranges[rank]))
            )
        ]
        for rank, share in enumerate(shares)
    ]


def _shares(members: Sequence[GroupMember], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """The indices of each rank's members, in their order."""
    if ranks == 1:
        return [list(range(len(members)))]
    groups = [list(group) for _, group in groupby(range(len(members)), key=lambda index: members[index].number)]
    ranking = balance([sum(lengths[index] for index in group) for group in groups], ranks)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for group, rank in zip(groups, ranking, strict=True):
        shares[rank] += group
    return shares


def _micro_batch(place: tuple[int, int, int, int], members: Sequence[GroupMember], staleness: np.ndarray) -> Block:
    """The micro-batch of `members` at `place`: batch, index, count, rank."""
    runs = list(runs_of(members))
    names = ("batch", "index", "count", "rank")
    lengths, tokens = gathered(runs, "lengths"), gathered(runs, "tokens")
    shelves = np.array([(run.shelf.partition, run.shelf.offset) for run in runs], np.int64).reshape(-1, 2)
    places = shelves.repeat([run.last - run.first for run in runs], axis=0)
    columns = {
        **_laid_out(runs),
        "lengths": lengths,
        "prompt_lengths": lengths - tokens,
        "rewards": gathered(runs, "rewards"),
        "temperatures": gathered(runs, "temperatures"),
        "truncated": gathered(runs, "truncated").astype(np.bool_),
        "trajectory_ids": [name for run in runs for name in run.shelf.ids[run.first : run.last]],
        "version_epochs": gathered(runs, "version_epochs"),
        "version_numbers": gathered(runs, "version_numbers"),
        "staleness": staleness,
        "lineage_partitions": places[:, 0],
        "lineage_offsets": places[:, 1],
    }
    schema = arrow_schema(MicroBatch)
    lists = {name: one_list(schema.field(name).type, values) for name, values in columns.items()}
    return Block.from_columns(MicroBatch, {**{n: [v] for n, v in zip(names, place, strict=True)}, **lists})


def _laid_out(runs: Sequence[RowRun]) -> dict[str, np.ndarray]:
    """Token ids, behaviour logprobs and loss masks of prompts and responses in turn; prompts have neither of these."""
    ids: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    for shelf, first, last in runs:
        asked, answered = shelf.prompts.ends[first : last + 1].tolist(), shelf.responses.ends[first : last + 1].tolist()
        no_logprobs = np.zeros(max(map(sub, asked[1:], asked)), np.float32)
        no_mask = np.zeros(len(no_logprobs), np.bool_)
        for p, p_end, r, r_end in zip(asked, asked[1:], answered, answered[1:], strict=False):
            ids += (shelf.prompts.values[p:p_end], shelf.responses.values[r:r_end])
            logprobs += (no_logprobs[: p_end - p], shelf.logprobs.values[r:r_end])
            masks += (no_mask[: p_end - p], shelf.loss_masks.values[r:r_end])
    kinds = {"token_ids": (ids, np.int32), "logprobs": (logprobs, np.float32), "loss_mask": (masks, np.bool_)}
    return {name: np.concatenate(parts) if parts else np.empty(0, kind) for name, (parts, kind) in kinds.items()}
