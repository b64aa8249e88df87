"""PackMicroBatches: the micro-batches of a selected batch, one partition for each share and division.

A micro-batch is concatenated sequences in parts of bounded size; every share has equally many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import sub
from typing import Any

import numpy as np

from operators.experience.buffer_layout import BufferLayout
from operators.experience.members import GroupMember, RowRun, gather_column, runs_of
from operators.io.elements import Output
from operators.io.map_outputs import MapOutputs
from schemas.arrow import arrow_schema
from schemas.block import Block
from schemas.columns import one_list
from schemas.records import MicroBatch
from schemas.topics import BATCHES, batch_partitions


@dataclass(frozen=True, slots=True)
class SelectedBatch:
    """The part of global batch `number` that `division` of the buffer has; `staleness` is aligned with the members.

    The fold has settled them, so the batch must be written in the same transaction.
    """

    number: int
    members: tuple[GroupMember, ...]
    staleness: np.ndarray
    division: int = 0


def divide(batch: SelectedBatch, divisions: Sequence[int], layout: BufferLayout) -> list[SelectedBatch]:
    """The part that each of `divisions` has of `batch`, whose groups are all theirs."""
    if len(divisions) == 1:
        return [replace(batch, division=divisions[0])]
    division_of = np.array([layout.division_of(member.number) for member in batch.members], np.int64)
    rows = {division: np.flatnonzero(division_of == division) for division in divisions}
    return [
        SelectedBatch(batch.number, tuple(batch.members[row] for row in own), batch.staleness[own], division)
        for division, own in rows.items()
    ]


class PackMicroBatches(MapOutputs):
    """Packs selected batches into micro-batches of at most `budget` tokens, equally many in each of `shares` shares.

    Each of the buffer's `divisions` has one partition of each share.
    """

    writes = (BATCHES,)

    def __init__(self, budget: int, shares: int, divisions: int = 1) -> None:
        super().__init__(partial(pack_batches, budget=budget, shares=shares, divisions=divisions), count_batches)


def pack_batches(outputs: Sequence[Any], budget: int, shares: int, divisions: int = 1) -> list[Any]:
    """The micro-batches of the selected batches in `outputs`; all other outputs stay, in their place."""

    def packed(output: Any) -> Iterator[Any]:
        if not isinstance(output, SelectedBatch):
            yield output
            return
        by_share = pack(output.number, output.members, output.staleness, budget, shares)
        for share, parts in enumerate(by_share):
            partition = batch_partitions(share, divisions)[output.division]
            yield from (Output(BATCHES, str(output.number), part, partition) for part in parts)

    return [each for output in outputs for each in packed(output)]


def count_batches(outputs: Sequence[Any], _: Sequence[Any]) -> dict[str, int]:
    """The counter of the step: batches. The fold counts their trajectories, the sink their micro-batches."""
    batches = len({output.number for output in outputs if isinstance(output, SelectedBatch)})
    return {"batches": batches} if batches else {}


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


def deal(loads: Sequence[int], shares: int) -> list[int]:
    """The share of each load: of every `shares` loads in turn, one to each, the largest to the share with the least.

    So each stretch of loads, such as a mini-batch, is in all shares, which have equally many and nearly equal sums.
    """
    assigned, totals = [0] * len(loads), [0] * shares
    for first in range(0, len(loads), shares):
        largest_first = sorted(range(first, min(first + shares, len(loads))), key=lambda index: (-loads[index], index))
        for index, share in zip(
            largest_first, sorted(range(shares), key=lambda share: (totals[share], share)), strict=False
        ):
            assigned[index] = share
            totals[share] += loads[index]
    return assigned


def pack(
    batch: int, members: Sequence[GroupMember], staleness: np.ndarray, budget: int, shares: int
) -> list[list[Block]]:
    """Global batch number `batch` as micro-batches of at most `budget` tokens, equally many in each of `shares` shares.

    Returns, by share, blocks of one MicroBatch each. Members of a group are consecutive and in one share. `staleness`,
    int64, is aligned with `members`. Every micro-batch has the count of its share, so a reader knows when the batch is
    complete; shares with less work have empty micro-batches at the end. A batch without members has one in each share.
    """
    lengths = gather_column(list(runs_of(members)), "lengths").tolist()
    rows = _rows_of_shares(members, lengths, shares)
    ranges = [list(split_by_tokens([lengths[i] for i in share], budget)) for share in rows]
    count = max(1, *map(len, ranges))
    return [
        [
            _micro_batch((batch, index, count, number), [members[i] for i in part], staleness[part])
            for index, part in enumerate(
                [share[r.start : r.stop] for r in ranges[number]] + [[]] * (count - len(ranges[number]))
            )
        ]
        for number, share in enumerate(rows)
    ]


def _rows_of_shares(members: Sequence[GroupMember], lengths: Sequence[int], shares: int) -> list[list[int]]:
    """By share: the indices of its members, in their order."""
    if shares == 1:
        return [list(range(len(members)))]
    groups = [list(group) for _, group in groupby(range(len(members)), key=lambda index: members[index].number)]
    assigned = deal([sum(lengths[index] for index in group) for group in groups], shares)
    rows: list[list[int]] = [[] for _ in range(shares)]
    for group, share in zip(groups, assigned, strict=True):
        rows[share] += group
    return rows


def _micro_batch(position: tuple[int, int, int, int], members: Sequence[GroupMember], staleness: np.ndarray) -> Block:
    """The micro-batch of `members` with `position` = (batch, index, count, share)."""
    runs = list(runs_of(members))
    names = ("batch", "index", "count", "rank")
    lengths, tokens = gather_column(runs, "lengths"), gather_column(runs, "tokens")
    run_origins = np.array([(run.block.partition, run.block.offset) for run in runs], np.int64).reshape(-1, 2)
    origins = run_origins.repeat([run.last - run.first for run in runs], axis=0)
    columns = {
        **_concatenated(runs),
        "lengths": lengths,
        "prompt_lengths": lengths - tokens,
        "rewards": gather_column(runs, "rewards"),
        "temperatures": gather_column(runs, "temperatures"),
        "truncated": gather_column(runs, "truncated").astype(np.bool_),
        "trajectory_ids": [name for run in runs for name in run.block.ids[run.first : run.last]],
        "version_epochs": gather_column(runs, "version_epochs"),
        "version_numbers": gather_column(runs, "version_numbers"),
        "staleness": staleness,
        "lineage_partitions": origins[:, 0],
        "lineage_offsets": origins[:, 1],
        "breaks": _breaks(runs, lengths, tokens),
        "context_rewards": _context_rewards(runs),
    }
    schema = arrow_schema(MicroBatch)
    lists = {name: one_list(schema.field(name).type, values) for name, values in columns.items()}
    return Block.from_columns(MicroBatch, {**{n: [v] for n, v in zip(names, position, strict=True)}, **lists})


def _breaks(runs: Sequence[RowRun], lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Where contexts restart among the tokens of all rows, int64: each conversation of an agent but the first."""
    responses = np.cumsum(lengths) - tokens
    found, row = [np.empty(0, np.int64)], 0
    for run in runs:
        starts, counts = run.block.conversation_starts, run.last - run.first
        of_rows = np.repeat(responses[row : row + counts], starts.counts()[run.first : run.last])
        within = starts.between(run.first, run.last)
        found.append((of_rows + within)[within > 0])
        row += counts
    return np.concatenate(found)


def _context_rewards(runs: Sequence[RowRun]) -> np.ndarray:
    """The reward of each context of all rows, float64; none if each has that of its row."""
    found, own = [np.empty(0)], False
    if not any(len(block.conversation_rewards.values) for block, _, _ in runs):
        return found[0]
    for block, first, last in runs:
        for row in range(first, last):
            rewards = block.conversation_rewards.between(row, row + 1)
            own = own or len(rewards) > 0
            contexts = max(1, len(block.conversation_starts.between(row, row + 1)))
            found.append(rewards if len(rewards) else np.repeat(block.rewards[row], contexts))
    return np.concatenate(found) if own else found[0]


def _concatenated(runs: Sequence[RowRun]) -> dict[str, np.ndarray]:
    """Token ids, behaviour logprobs and loss masks, prompt and response in turn; the last two are 0 for prompts."""
    ids: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    for block, first, last in runs:
        prompts = block.prompts.ends[first : last + 1].tolist()
        responses = block.responses.ends[first : last + 1].tolist()
        no_logprobs = np.zeros(max(map(sub, prompts[1:], prompts)), np.float32)
        no_mask = np.zeros(len(no_logprobs), np.bool_)
        for p, p_end, r, r_end in zip(prompts, prompts[1:], responses, responses[1:], strict=False):
            ids += (block.prompts.values[p:p_end], block.responses.values[r:r_end])
            logprobs += (no_logprobs[: p_end - p], block.logprobs.values[r:r_end])
            masks += (no_mask[: p_end - p], block.loss_masks.values[r:r_end])
    kinds = {"token_ids": (ids, np.int32), "logprobs": (logprobs, np.float32), "loss_mask": (masks, np.bool_)}
    return {name: np.concatenate(parts) if parts else np.empty(0, kind) for name, (parts, kind) in kinds.items()}
