"""The import step: rows of an exported dataset as experience, each once, whoever is killed when.

What is imported is fixed when an import begins, and noted in the transaction of its first rows: up to which offsets of
the dataset, from which group number on, and how many rows are written. So who each row becomes is known again after a
kill, and a dataset that has grown since is imported from there when the same command is given again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from infra.storage import StorageFolder
from operators.export.config import Contents
from operators.export.folder import next_offsets, read_contents, read_parts
from operators.export.import_columns import COLUMNS, as_experiences
from operators.export.import_plan import ImportPlan, Span, importable, plan_of, tables
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored
from schemas.block import Block
from schemas.identity import group_id
from schemas.records import Metric
from schemas.topics import EXPERIENCES, METRICS, partition_of

ROWS_A_FOLD = 512
"""Rows that are written in one transaction, or a few of them."""


@dataclass(frozen=True)
class ImportRows:
    """Feeds the dataset in `folder` to a run whose experiences have `partitions` partitions."""

    folder: StorageFolder
    partitions: int

    def restore(self, restored: Restored) -> Importing:
        """Raises ExportError where the folder holds nothing that can be imported."""
        return Importing(self, restored.state)


class Importing:
    """What one start has written of the dataset. `state` are those of all datasets that were imported before."""

    def __init__(
        self, step: ImportRows, state: Mapping[str, Any], now: Callable[[], int] = lambda: time.time_ns() // 10**6
    ) -> None:
        self._step, self._now = step, now
        self._contents = read_contents(step.folder)
        importable(self._contents)
        self._marks = dict(state)
        self._of = identity(self._contents)
        self._span, self._base, self._done = self._begun()
        self._plan: ImportPlan = plan_of(step.folder, self._contents, self._span)
        self._marks["groups"] = max(self._marks.get("groups", 0), self._base + self._plan.groups)
        self._rows = self._remaining()
        self._told = False

    def fold(self, polled: Polled) -> Sequence[Output]:
        """Write the next rows; at the end, a metric that says what there was. Raises ExportError."""
        rows = next(self._rows, None)
        if rows is not None:
            outputs = self._outputs(rows)
            self._done += len(rows)
            return outputs
        if self._told:
            return ()
        self._told = True
        values = {
            "trajectories": float(len(self._plan)),
            "groups": float(self._plan.groups),
            "first": float(self._base),
        }
        return [Output(METRICS, "import", Metric("import", self._base, values, self._now()))]

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        """How far it is; begun at its end, once all is told."""
        if self._told:
            return Checkpoint(state={**self._marks, self._of: [self._span.end, self._span.end, 0, 0]})
        return Checkpoint(state={**self._marks, self._of: [*self._span, self._base, self._done]})

    def busy(self) -> bool:
        """Until all is told."""
        return not self._told

    def close(self) -> None:
        """It holds nothing."""

    def _begun(self) -> tuple[Span, int, int]:
        """What is to be imported, its first group's number, and how many rows are written."""
        *edges, base, done = self._marks.get(self._of, [self._contents.starts, self._contents.starts, 0, 0])
        first, end = ({int(partition): offset for partition, offset in edge.items()} for edge in edges)
        if first != end:
            return Span(first, end), base, done
        there = next_offsets(self._contents, read_parts(self._step.folder))
        return Span(first, there), self._marks.get("groups", 0), 0

    def _remaining(self) -> Iterator[pa.Table]:
        """The rows that are not written, a few at a time."""
        seen = 0
        for table in tables(self._step.folder, self._contents, self._span, COLUMNS):
            start = min(len(table), max(0, self._done - seen))
            seen += len(table)
            for first in range(start, len(table), ROWS_A_FOLD):
                yield table.slice(first, ROWS_A_FOLD)

    def _outputs(self, rows: pa.Table) -> list[Output]:
        block = as_experiences(rows, self._contents, self._plan, self._done, self._base, self._now())
        numbers = block.column("trajectory.prompt.number").to_pylist()
        by_partition: dict[int, list[int]] = {}
        for row, number in enumerate(numbers):
            by_partition.setdefault(partition_of(number, self._step.partitions), []).append(row)
        return [
            Output(EXPERIENCES, group_id("imported", numbers[mine[0]]), self._part(block, mine), partition)
            for partition, mine in by_partition.items()
        ]

    def _part(self, block: Block, rows: list[int]) -> Block:
        return block if len(rows) == len(block) else block.take(rows)


def identity(contents: Contents) -> str:
    """What tells a dataset from others, wherever its folder lies."""
    said = json.dumps(asdict(contents), sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]
