"""Trajectories in the buffer: rows of the Kafka records that they came in, which are never taken apart.

A member is what writers, samplers and evictions look at. Its tokens stay where Arrow has put them until it is packed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.block import Block
from schemas.identity import Purpose, TrajectoryKey
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


class Shelf:
    """The experiences of one Kafka record, as columns."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.prompts = self._ragged("prompt.token_ids")
        self.responses = self._ragged("response.token_ids")
        self.logprobs = self._ragged("response.logprobs")

    @cached_property
    def loss_masks(self) -> Ragged:
        """A byte a token: made when it is first needed."""
        return self._ragged("response.loss_mask")

    def column(self, name: str) -> pa.Array:
        """Field `name` of the trajectories."""
        return self.block.column(f"trajectory.{name}")

    def _ragged(self, name: str) -> Ragged:
        column = self.column(name)
        return Ragged(column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy())


@dataclass(slots=True, eq=False)
class Member:
    """One scored trajectory: row `row` of `shelf`, from `offset` of `partition` of the experiences topic.

    `key` is its identity: the `number` of its prompt and group, and its own, `member`, in a group of `size`. `accuracy`
    is None where nothing can tell; `tokens` are its response's, `length` is prompt and response. `version` made it
    (None: nothing did), drawing at `temperature`; `finish_staleness` newer ones had been announced when it finished.
    `scored_at` in Unix milliseconds.
    """

    shelf: Shelf
    row: int
    partition: int
    offset: int
    key: TrajectoryKey
    purpose: Purpose
    number: int
    member: int
    size: int
    task: str
    temperature: float
    reward: float
    accuracy: float | None
    failed: bool
    truncated: bool
    error: str | None
    version: PolicyVersion | None
    finish_staleness: int
    tokens: int
    length: int
    scored_at: int

    def staleness(self, newest: PolicyVersion | None) -> int:
        """Versions between `newest`, the newest announced, and the one that made it."""
        return max(0, newest.number - self.version.number) if newest and self.version else 0

    def experience(self) -> Experience:
        """The whole record."""
        experience: Experience = self.shelf.block.part(self.row, 1).records()[0]
        return experience


def read_members(block: Block, partition: int, offset: int) -> list[Member]:
    """The members in `block`, the experiences at `offset` of `partition`."""
    shelf = Shelf(block)
    responses = shelf.responses.counts()
    finish = shelf.column("finish_reason").to_pylist()
    errors = shelf.column("error").to_pylist()
    identities = (
        shelf.column("prompt.purpose").to_pylist(),
        shelf.column("prompt.number").to_numpy().tolist(),
        shelf.column("member").to_numpy().tolist(),
    )
    columns: tuple[Iterable[Any], ...] = (
        map(TrajectoryKey, *identities),
        *identities,
        shelf.column("prompt.samples").to_numpy().tolist(),
        shelf.column("prompt.task").to_pylist(),
        shelf.column("prompt.sampling.temperature").to_numpy().tolist(),
        block.column("reward").to_numpy().tolist(),
        _accuracies(block),
        [reason == "failed" for reason in finish],
        [reason == "length" for reason in finish],
        [own or scored for own, scored in zip(errors, block.column("error").to_pylist(), strict=True)],
        *_versions(shelf),
        responses.tolist(),
        (responses + shelf.prompts.counts()).tolist(),
        block.column("scored_at").to_numpy().tolist(),
    )
    return [Member(shelf, row, partition, offset, *fields) for row, fields in enumerate(zip(*columns, strict=True))]


def _accuracies(block: Block) -> list[float | None]:
    """The accuracy component of each row."""
    components = block.column("components")
    found: list[float | None] = [None] * len(block)
    parts = components.flatten()
    named = pc.equal(parts.field("name"), ACCURACY).to_numpy(zero_copy_only=False)
    if named.any():
        rows = pc.list_parent_indices(components).to_numpy()[named].tolist()
        for row, value in zip(rows, parts.field("value").to_numpy()[named].tolist(), strict=True):
            found[row] = value
    return found


def _versions(shelf: Shelf) -> tuple[list[PolicyVersion | None], list[int]]:
    """The version that made each row, and how much newer the newest was when it finished."""
    spans = shelf.column("version_spans")
    counts = np.diff(spans.offsets.to_numpy())
    # The first span of each row that has one; spans of other rows are not skipped by flatten(), so values are indexed.
    first = spans.offsets.to_numpy()[:-1]
    version = spans.values.field("version")
    epochs, numbers = version.field("epoch").to_numpy(), version.field("number").to_numpy()
    newest = shelf.column("newest_version.number").fill_null(-1).to_numpy().tolist()
    known: dict[tuple[int, int], PolicyVersion] = {}
    versions: list[PolicyVersion | None] = []
    ages: list[int] = []
    for at, count, announced in zip(first.tolist(), counts.tolist(), newest, strict=True):
        if not count:
            versions.append(None)
            ages.append(0)
            continue
        named = (int(epochs[at]), int(numbers[at]))
        versions.append(known.setdefault(named, PolicyVersion(*named)))
        ages.append(max(0, announced - named[1]) if announced >= 0 else 0)
    return versions, ages
