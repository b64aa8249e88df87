"""Trajectories in the buffer: rows of the Arrow blocks of their Kafka records, which are never split.

Writers, samplers and evictions see a member: one row of a block. The buffer itself works on columns, a block or a run
of consecutive rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.block import Block
from schemas.identity import Purpose, TrajectoryKey, trajectory_id
from schemas.records import Experience, PolicyVersion

T = TypeVar("T")
ACCURACY = "accuracy"
"""The reward component that says whether an answer is right."""


class Ragged(NamedTuple):
    """A column of lists of numbers: the list of row i is `values[ends[i] : ends[i + 1]]`."""

    values: np.ndarray
    ends: np.ndarray

    def between(self, first: int, last: int) -> np.ndarray:
        """The numbers of rows `first` to before `last`, without a copy."""
        return self.values[self.ends[first] : self.ends[last]]

    def counts(self) -> np.ndarray:
        """How many numbers each row has, int64[rows]."""
        return np.diff(self.ends).astype(np.int64)


class RewardComponents(NamedTuple):
    """The reward components of a block's rows, by row: component i is `names[i]` of row `rows[i]`."""

    rows: np.ndarray
    names: list[str]
    values: np.ndarray

    def between(self, first: int, last: int) -> Iterator[tuple[str, float]]:
        """Name and value of each component of rows `first` to before `last`."""
        start, end = np.searchsorted(self.rows, (first, last))
        return zip(self.names[start:end], self.values[start:end].tolist(), strict=True)


class ExperienceBlock:
    """The experiences at `offset` of `partition`, as columns: lists if read by row, arrays if read as a whole.

    `numbers` and `sizes` are the group numbers and group sizes; `tokens`, int64[rows], the response lengths, `lengths`
    those of prompt and response together. Where `generated`, version `version_epochs`.`version_numbers` generated the
    row, and `finish_staleness` newer versions had been announced when it finished.
    """

    def __init__(self, records: Block, partition: int, offset: int) -> None:
        self.records, self.partition, self.offset = records, partition, offset
        self.prompts = self._ragged("prompt.token_ids")
        self.responses = self._ragged("response.token_ids")
        self.logprobs = self._ragged("response.logprobs")
        self.tokens = self.responses.counts()
        self.lengths = self.tokens + self.prompts.counts()
        self.purposes: list[Purpose] = self.column("prompt.purpose").to_pylist()
        self.prompt_numbers: list[int] = self.column("prompt.number").to_pylist()
        self.numbers = group_numbers(self.purposes, self.prompt_numbers)
        self.members: list[int] = self.column("member").to_pylist()
        self.sizes: list[int] = self.column("prompt.samples").to_pylist()
        self.rewards = records.column("reward").to_numpy()
        self.temperatures = self.column("prompt.sampling.temperature").to_numpy()
        self.failed = self._finished("failed")
        self.unverified = pc.is_valid(records.column("error")).to_numpy(zero_copy_only=False)
        self._read_versions()

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def loss_masks(self) -> Ragged:
        """One byte a token; built at first use."""
        return self._ragged("response.loss_mask")

    @cached_property
    def conversation_starts(self) -> Ragged:
        """Where each conversation of an agent begins in the response."""
        column = self.column("conversations")
        return Ragged(column.values.field("start").to_numpy(zero_copy_only=False), column.offsets.to_numpy())

    @cached_property
    def conversation_rewards(self) -> Ragged:
        """The reward of each conversation of an agent; none in rows where each has the row's reward."""
        column = self.records.column("conversation_rewards")
        return Ragged(column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy())

    @cached_property
    def ids(self) -> list[str]:
        """Trajectory ids."""
        return list(map(trajectory_id, self.purposes, self.prompt_numbers, self.members))

    @cached_property
    def tasks(self) -> list[str]:
        """The tasks of the prompts."""
        tasks: list[str] = self.column("prompt.task").to_pylist()
        return tasks

    @cached_property
    def truncated(self) -> np.ndarray:
        """bool[rows]: whether the response was cut off at its length limit."""
        return self._finished("length")

    @cached_property
    def errors(self) -> list[str | None]:
        """The error of generation, or else of scoring."""
        errors: list[str | None] = pc.coalesce(self.column("error"), self.records.column("error")).to_pylist()
        return errors

    @cached_property
    def components(self) -> RewardComponents:
        """What each reward function returned, and the accuracy."""
        column = self.records.column("components")
        parts = column.flatten()
        rows = pc.list_parent_indices(column).to_numpy()
        return RewardComponents(rows, parts.field("name").to_pylist(), parts.field("value").to_numpy())

    @cached_property
    def accuracies(self) -> list[float | None]:
        """The accuracy component; None without one."""
        found: list[float | None] = [None] * len(self)
        for row, name, value in zip(*self.components, strict=True):
            if name == ACCURACY:
                found[row] = float(value)
        return found

    def column(self, name: str) -> pa.Array:
        """Field `name` of the trajectories."""
        return self.records.column(f"trajectory.{name}")

    def _ragged(self, name: str) -> Ragged:
        column = self.column(name)
        return Ragged(column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy())

    def _finished(self, reason: str) -> np.ndarray:
        found: np.ndarray = pc.equal(self.column("finish_reason"), reason).to_numpy(zero_copy_only=False)
        return found

    def _read_versions(self) -> None:
        spans = self.column("version_spans")
        ends = spans.offsets.to_numpy()
        self.generated = np.diff(ends) > 0
        # The first span of each row that has one. flatten() would not skip empty rows, so values are indexed; a row
        # without spans takes the first span of the block, which is never used.
        first = np.where(self.generated, ends[:-1], ends[0])
        version = spans.values.field("version")
        columns = [version.field(name).to_numpy() for name in ("epoch", "number")]
        nothing = np.zeros(len(self), np.int64)
        self.version_epochs, self.version_numbers = (c[first] if len(c) > ends[0] else nothing for c in columns)
        self.newest_numbers = self.column("newest_version.number").fill_null(-1).to_numpy()
        self.finish_staleness = np.where(self.generated, np.maximum(self.newest_numbers - self.version_numbers, 0), 0)


def group_numbers(purposes: Sequence[Purpose], numbers: list[int]) -> list[int]:
    """The number of each prompt's group in the buffer: imported group n, counted from 0, becomes -1 - n."""
    if "imported" not in purposes:
        return numbers
    return [~number if purpose == "imported" else number for purpose, number in zip(purposes, numbers, strict=True)]


class _Column(Generic[T]):
    """An attribute of a member: what its row has in a column of its block, as `kind`."""

    def __init__(self, name: str, kind: Callable[[Any], T]) -> None:
        self._name, self._kind = name, kind

    def __get__(self, member: GroupMember, owner: type | None = None) -> T:
        return self._kind(getattr(member.block, self._name)[member.row])


class GroupMember:
    """One scored trajectory: row `row` of `block`. This is all that a user's writers, samplers and evictions see."""

    __slots__ = ("block", "row")

    def __init__(self, block: ExperienceBlock, row: int) -> None:
        self.block, self.row = block, row

    @property
    def key(self) -> TrajectoryKey:
        """Its identity."""
        block, row = self.block, self.row
        return TrajectoryKey(block.purposes[row], block.prompt_numbers[row], block.members[row])

    @property
    def trajectory_id(self) -> str:
        """Its identity as text."""
        return self.block.ids[self.row]

    number = _Column("numbers", int)
    """The number of its group: its prompt's number, or a negative number if it was imported."""
    member = _Column("members", int)
    """Its index in its group."""
    size = _Column("sizes", int)
    """How many members its group has."""
    task = _Column("tasks", str)
    """The task of its prompt."""
    temperature = _Column("temperatures", float)
    """The sampling temperature."""
    reward = _Column("rewards", float)
    accuracy: _Column[float | None] = _Column("accuracies", lambda value: value)
    """1 for a correct answer; None if no verifier can tell."""
    truncated = _Column("truncated", bool)
    """Whether it was cut off at its length limit."""
    error: _Column[str | None] = _Column("errors", lambda value: value)
    """The error of generation, or else of scoring."""
    tokens = _Column("tokens", int)
    """Tokens of its response."""
    length = _Column("lengths", int)
    """Tokens of prompt and response."""
    newest_number = _Column("newest_numbers", int)
    """The number of the newest version announced when it finished; -1 if there was none."""
    finish_staleness = _Column("finish_staleness", int)
    """How many newer versions had been announced when it finished."""

    @property
    def conversation_rewards(self) -> list[float]:
        """The reward of each conversation of an agent; empty if each has `reward`."""
        found: list[float] = self.block.conversation_rewards.between(self.row, self.row + 1).tolist()
        return found

    @property
    def version(self) -> PolicyVersion | None:
        """The weight version that generated it; None if nothing was generated."""
        block, row = self.block, self.row
        if not block.generated[row]:
            return None
        return PolicyVersion(int(block.version_epochs[row]), int(block.version_numbers[row]))

    def staleness(self, newest: PolicyVersion | None) -> int:
        """How many versions `newest`, the newest announced, is ahead of the version that generated it."""
        block, row = self.block, self.row
        if newest is None or not block.generated[row]:
            return 0
        return max(0, newest.number - int(block.version_numbers[row]))

    def experience(self) -> Experience:
        """The complete record."""
        experience: Experience = self.block.records.slice(self.row, 1).records()[0]
        return experience


class RowRun(NamedTuple):
    """Rows `first` to before `last` of a block: members that are consecutive in the buffer and in the block."""

    block: ExperienceBlock
    first: int
    last: int

    def by_group(self) -> Iterator[tuple[int, RowRun]]:
        """Its parts, each of consecutive rows of one group, with the group's number."""
        first = self.first
        for number, rows in groupby(self.block.numbers[self.first : self.last]):
            last = first + sum(1 for _ in rows)
            yield number, RowRun(self.block, first, last)
            first = last


def runs_of(members: Sequence[GroupMember]) -> Iterator[RowRun]:
    """`members`, in their order, as the fewest possible runs."""
    first = 0
    for last in range(1, len(members) + 1):
        before = members[last - 1]
        if last < len(members) and members[last].block is before.block and members[last].row == before.row + 1:
            continue
        yield RowRun(before.block, members[first].row, before.row + 1)
        first = last


def gather_column(runs: Sequence[RowRun], column: str) -> np.ndarray:
    """The values of `column`, an array attribute of `ExperienceBlock`, in all rows of `runs`."""
    if not runs:
        return np.empty(0, np.int64)
    return np.concatenate([getattr(run.block, column)[run.first : run.last] for run in runs])


def staleness_of(runs: Sequence[RowRun], newest: PolicyVersion | None) -> np.ndarray:
    """The staleness of all rows of `runs`, int64, as `GroupMember.staleness` defines it."""
    numbers = gather_column(runs, "version_numbers")
    if newest is None:
        return np.zeros_like(numbers)
    return np.where(gather_column(runs, "generated"), np.maximum(newest.number - numbers, 0), 0)
