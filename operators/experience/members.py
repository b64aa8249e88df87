"""Trajectories in the buffer: rows of the Kafka records that they came in, which are never taken apart.

A member is what writers, samplers and evictions look at: a place on a shelf. What the buffer itself does to every
trajectory it does to columns, a shelf or a run of neighbours at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.block import Block
from schemas.identity import Purpose, TrajectoryKey, trajectory_id
from schemas.records import Experience, PolicyVersion

ACCURACY = "accuracy"
"""The reward component that says whether an answer is right."""


class Ragged(NamedTuple):
    """Lists of numbers end to end: those of row i are `values[ends[i] : ends[i + 1]]`."""

    values: np.ndarray
    ends: np.ndarray

    def between(self, first: int, last: int) -> np.ndarray:
        """The numbers of rows `first` to before `last`, without a copy."""
        return self.values[self.ends[first] : self.ends[last]]

    def counts(self) -> np.ndarray:
        """How many numbers each row has, int64[rows]."""
        return np.diff(self.ends).astype(np.int64)


class ExperienceBlock:
    """The experiences at `offset` of `partition`, as columns: lists where one row is asked for, arrays where many are.

    `numbers` and `sizes` are those of the groups; `tokens` are responses', int64[rows], `lengths` prompts' and
    responses' together. The version `version_epochs`.`version_numbers` made a row if `generated`, and
    `finish_staleness` newer ones had been announced when it finished.
    """

    def __init__(self, block: Block, partition: int, offset: int) -> None:
        self.block, self.partition, self.offset = block, partition, offset
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
        self.rewards = block.column("reward").to_numpy()
        self.temperatures = self.column("prompt.sampling.temperature").to_numpy()
        self.failed = self._finished("failed")
        self._read_versions()

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def loss_masks(self) -> Ragged:
        """A byte a token: made when it is first needed."""
        return self._ragged("response.loss_mask")

    @cached_property
    def ids(self) -> list[str]:
        """Trajectory ids."""
        return list(map(trajectory_id, self.purposes, self.prompt_numbers, self.members))

    @cached_property
    def tasks(self) -> list[str]:
        """The tasks that asked."""
        tasks: list[str] = self.column("prompt.task").to_pylist()
        return tasks

    @cached_property
    def truncated(self) -> np.ndarray:
        """bool[rows]: what was cut off at its length limit."""
        return self._finished("length")

    @cached_property
    def errors(self) -> list[str | None]:
        """What went wrong with generation, or else with scoring."""
        errors: list[str | None] = pc.coalesce(self.column("error"), self.block.column("error")).to_pylist()
        return errors

    @cached_property
    def accuracies(self) -> list[float | None]:
        """The accuracy component; None where there is none."""
        components = self.block.column("components")
        found: list[float | None] = [None] * len(self)
        parts = components.flatten()
        named = pc.equal(parts.field("name"), ACCURACY).to_numpy(zero_copy_only=False)
        rows = pc.list_parent_indices(components).to_numpy()[named].tolist()
        for row, value in zip(rows, parts.field("value").to_numpy()[named].tolist(), strict=True):
            found[row] = value
        return found

    def column(self, name: str) -> pa.Array:
        """Field `name` of the trajectories."""
        return self.block.column(f"trajectory.{name}")

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
        # The first span of each row that has one; spans of other rows are not skipped by flatten(), so values are
        # indexed. A row without any takes the first of all, which nobody looks at.
        first = np.where(self.generated, ends[:-1], ends[0])
        version = spans.values.field("version")
        columns = [version.field(name).to_numpy() for name in ("epoch", "number")]
        nothing = np.zeros(len(self), np.int64)
        self.version_epochs, self.version_numbers = (c[first] if len(c) > ends[0] else nothing for c in columns)
        self.newest_numbers = self.column("newest_version.number").fill_null(-1).to_numpy()
        self.finish_staleness = np.where(self.generated, np.maximum(self.newest_numbers - self.version_numbers, 0), 0)


def group_numbers(purposes: Sequence[Purpose], numbers: list[int]) -> list[int]:
    """The number of each prompt's group in the buffer: imported ones, counted from 0 as well, go down from -1."""
    if "imported" not in purposes:
        return numbers
    return [~number if purpose == "imported" else number for purpose, number in zip(purposes, numbers, strict=True)]


class GroupMember:
    """One scored trajectory: row `row` of `shelf`. Samplers and the like of the user's see these, and nothing else."""

    __slots__ = ("row", "shelf")

    def __init__(self, shelf: ExperienceBlock, row: int) -> None:
        self.shelf, self.row = shelf, row

    @property
    def key(self) -> TrajectoryKey:
        """Its identity."""
        shelf, row = self.shelf, self.row
        return TrajectoryKey(shelf.purposes[row], shelf.prompt_numbers[row], shelf.members[row])

    @property
    def trajectory_id(self) -> str:
        """Its identity in words."""
        return self.shelf.ids[self.row]

    @property
    def number(self) -> int:
        """Of its group: that of its prompt, or below 0 where it was imported."""
        return self.shelf.numbers[self.row]

    @property
    def member(self) -> int:
        """Its number in its group."""
        return self.shelf.members[self.row]

    @property
    def size(self) -> int:
        """How many members its group has."""
        return self.shelf.sizes[self.row]

    @property
    def task(self) -> str:
        """The task that asked."""
        return self.shelf.tasks[self.row]

    @property
    def temperature(self) -> float:
        """At which it was drawn."""
        return float(self.shelf.temperatures[self.row])

    @property
    def reward(self) -> float:
        """What it was worth."""
        return float(self.shelf.rewards[self.row])

    @property
    def accuracy(self) -> float | None:
        """1 for a right answer; None where nothing can tell."""
        return self.shelf.accuracies[self.row]

    @property
    def truncated(self) -> bool:
        """Whether it was cut off at its length limit."""
        return bool(self.shelf.truncated[self.row])

    @property
    def error(self) -> str | None:
        """What went wrong with generation or scoring."""
        return self.shelf.errors[self.row]

    @property
    def version(self) -> PolicyVersion | None:
        """The weights that made it; None: nothing did."""
        shelf, row = self.shelf, self.row
        if not shelf.generated[row]:
            return None
        return PolicyVersion(int(shelf.version_epochs[row]), int(shelf.version_numbers[row]))

    @property
    def tokens(self) -> int:
        """Of its response."""
        return int(self.shelf.tokens[self.row])

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return int(self.shelf.lengths[self.row])

    @property
    def newest_number(self) -> int:
        """The number of the newest version announced when it finished; -1 where there was none."""
        return int(self.shelf.newest_numbers[self.row])

    @property
    def finish_staleness(self) -> int:
        """How many newer versions had been announced when it finished."""
        return int(self.shelf.finish_staleness[self.row])

    def staleness(self, newest: PolicyVersion | None) -> int:
        """Versions between `newest`, the newest announced, and the one that made it."""
        shelf, row = self.shelf, self.row
        if newest is None or not shelf.generated[row]:
            return 0
        return max(0, newest.number - int(shelf.version_numbers[row]))

    def experience(self) -> Experience:
        """The whole record."""
        experience: Experience = self.shelf.block.part(self.row, 1).records()[0]
        return experience


class RowRun(NamedTuple):
    """Rows `first` to before `last` of a shelf: members that are neighbours in the buffer as they are there."""

    shelf: ExperienceBlock
    first: int
    last: int

    def by_group(self) -> Iterator[tuple[int, RowRun]]:
        """Its parts, each of neighbours of one group, with the group's number."""
        first = self.first
        for number, rows in groupby(self.shelf.numbers[self.first : self.last]):
            last = first + sum(1 for _ in rows)
            yield number, RowRun(self.shelf, first, last)
            first = last


def read_members(block: Block, partition: int, offset: int) -> list[GroupMember]:
    """The members in `block`, the experiences at `offset` of `partition`."""
    shelf = ExperienceBlock(block, partition, offset)
    return [GroupMember(shelf, row) for row in range(len(shelf))]


def runs_of(members: Sequence[GroupMember]) -> Iterator[RowRun]:
    """`members`, in their order, in as few runs as they make."""
    first = 0
    for last in range(1, len(members) + 1):
        before = members[last - 1]
        if last < len(members) and members[last].shelf is before.shelf and members[last].row == before.row + 1:
            continue
        yield RowRun(before.shelf, members[first].row, before.row + 1)
        first = last


def gathered(runs: Sequence[RowRun], column: str) -> np.ndarray:
    """The values of a column of `ExperienceBlock`, an array there, in all rows of `runs`."""
    if not runs:
        return np.empty(0, np.int64)
    return np.concatenate([getattr(run.shelf, column)[run.first : run.last] for run in runs])


def ages(runs: Sequence[RowRun], newest: PolicyVersion | None) -> np.ndarray:
    """Staleness of all rows of `runs`, int64, as `GroupMember.staleness` has it."""
    made = gathered(runs, "version_numbers")
    if newest is None:
        return np.zeros_like(made)
    return np.where(gathered(runs, "generated"), np.maximum(newest.number - made, 0), 0)
