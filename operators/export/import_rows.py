"""The import step: writes the rows of an exported dataset as experiences, each exactly once, across kills.

The span of an import is fixed when it begins. The commit note holds the span, the first group number and the number of
rows written, in the transaction that writes the rows. So each row gets the same id after a kill, and the same command
later imports the rows by which the dataset has grown.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from infra.runners.step_metrics import phase
from infra.storage import StorageFolder
from operators.export.config import Contents
from operators.export.folder import next_offsets, read_contents, read_parts
from operators.export.import_columns import COLUMNS, as_experiences
from operators.export.import_plan import ImportPlan, Span, check_importable, import_tables, plan_import
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored
from schemas.block import Block
from schemas.identity import group_id
from schemas.records import Metric
from schemas.topics import EXPERIENCES, METRICS, partition_of

MAX_ROWS_PER_FOLD = 512
"""Rows in one emission, at most."""


@dataclass(frozen=True)
class ImportRows:
    """Imports the dataset in `folder` into a run whose topic `experiences` has `partitions` partitions."""

    folder: StorageFolder
    partitions: int

    def restore(self, restored: Restored) -> Importing:
        """Open the dataset. Raises ExportError if it cannot be imported."""
        return Importing(self, restored.state)


class Importing:
    """The state of one start. `state` of the commit note has an entry for each dataset imported before."""

    def __init__(
        self, step: ImportRows, state: Mapping[str, Any], now: Callable[[], int] = lambda: time.time_ns() // 10**6
    ) -> None:
        self._step, self._now = step, now
        self._contents = read_contents(step.folder)
        check_importable(self._contents)
        self._state = dict(state)
        self._dataset = dataset_id(self._contents)
        self._span, self._base, self._done = self._restored_span()
        self._plan: ImportPlan = plan_import(step.folder, self._contents, self._span)
        self._state["groups"] = max(self._state.get("groups", 0), self._base + self._plan.groups)
        self._rows = self._remaining()
        self._reported = False

    def fold(self, polled: Polled) -> Sequence[Output]:
        """Write the next rows; after the last, a metric with the totals. Raises ExportError."""
        with phase("read rows"):
            rows = next(self._rows, None)
        if rows is not None:
            with phase("number and convert rows"):
                outputs = self._outputs(rows)
            self._done += len(rows)
            return outputs
        if self._reported:
            return ()
        self._reported = True
        values = {
            "trajectories": float(len(self._plan)),
            "groups": float(self._plan.groups),
            "first": float(self._base),
        }
        return [Output(METRICS, "import", Metric("import", self._base, values, self._now()))]

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        """The progress of the import; once it is complete, an empty span from its end."""
        if self._reported:
            return Checkpoint(state={**self._state, self._dataset: [self._span.end, self._span.end, 0, 0]})
        return Checkpoint(state={**self._state, self._dataset: [*self._span, self._base, self._done]})

    def busy(self) -> bool:
        """True until the metric is written."""
        return not self._reported

    def close(self) -> None:
        """Nothing to release."""

    def _restored_span(self) -> tuple[Span, int, int]:
        """The span to import, the number of its first group, and how many of its rows are written."""
        *edges, base, done = self._state.get(self._dataset, [self._contents.starts, self._contents.starts, 0, 0])
        first, end = ({int(partition): offset for partition, offset in edge.items()} for edge in edges)
        if first != end:
            return Span(first, end), base, done
        exported = next_offsets(self._contents, read_parts(self._step.folder))
        return Span(first, exported), self._state.get("groups", 0), 0

    def _remaining(self) -> Iterator[pa.Table]:
        """The rows that are not written yet, at most MAX_ROWS_PER_FOLD at a time."""
        seen = 0
        for table in import_tables(self._step.folder, self._contents, self._span, COLUMNS):
            start = min(len(table), max(0, self._done - seen))
            seen += len(table)
            for first in range(start, len(table), MAX_ROWS_PER_FOLD):
                yield table.slice(first, MAX_ROWS_PER_FOLD)

    def _outputs(self, rows: pa.Table) -> list[Output]:
        block = as_experiences(rows, self._contents, self._plan, self._done, self._base, self._now())
        numbers = block.column("trajectory.prompt.number").to_pylist()
        by_partition: dict[int, list[int]] = {}
        for row, number in enumerate(numbers):
            by_partition.setdefault(partition_of(number, self._step.partitions), []).append(row)
        return [
            Output(EXPERIENCES, group_id("imported", numbers[chosen[0]]), self._part(block, chosen), partition)
            for partition, chosen in by_partition.items()
        ]

    def _part(self, block: Block, rows: list[int]) -> Block:
        return block if len(rows) == len(block) else block.take(rows)


def dataset_id(contents: Contents) -> str:
    """An id of the dataset that does not depend on the location of its folder."""
    text = json.dumps(asdict(contents), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
