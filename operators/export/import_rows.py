"""The import step: writes the rows of an exported dataset as experiences, each exactly once, across kills.

The span of an import is fixed when it begins. The commit note holds the span, the first group number and the number of
rows written, in the transaction that writes the rows. So each row gets the same id after a kill, and the same command
later imports the rows by which the dataset has grown.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from infra.clocks import wall_ms
from infra.runners.step_metrics import phase
from infra.storage import StorageFolder
from operators.export.columns import LOG_POSITION, dataset_name, row_schema
from operators.export.config import Contents
from operators.export.folder import ExportError, next_offsets, read_contents, read_parts
from operators.export.import_plan import ImportedSpan, ImportPlan, check_importable, import_tables, plan_import
from operators.io.elements import Checkpoint, Output, PartitionKey, Polled, Restored, ShardFold
from schemas.arrow import arrow_schema
from schemas.block import Block
from schemas.identity import group_id
from schemas.records import Experience, Metric, PolicyVersion
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


class Importing(ShardFold):
    """The state of one start. `state` of the commit note has an entry for each dataset imported before."""

    def __init__(self, step: ImportRows, state: Mapping[str, Any]) -> None:
        self._step = step
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
        return [Output(METRICS, "import", Metric("import", self._base, values, wall_ms()))]

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        """The progress of the import; once it is complete, an empty span from its end."""
        if self._reported:
            return Checkpoint(state={**self._state, self._dataset: [self._span.end, self._span.end, 0, 0]})
        return Checkpoint(state={**self._state, self._dataset: [*self._span, self._base, self._done]})

    def busy(self) -> bool:
        """True until the metric is written."""
        return not self._reported

    def _restored_span(self) -> tuple[ImportedSpan, int, int]:
        """The span to import, the number of its first group, and how many of its rows are written."""
        *edges, base, done = self._state.get(self._dataset, [self._contents.starts, self._contents.starts, 0, 0])
        first, end = ({int(partition): offset for partition, offset in edge.items()} for edge in edges)
        if first != end:
            return ImportedSpan(first, end), base, done
        exported = next_offsets(self._contents, read_parts(self._step.folder))
        return ImportedSpan(first, exported), self._state.get("groups", 0), 0

    def _remaining(self) -> Iterator[pa.Table]:
        """The rows that are not written yet, at most MAX_ROWS_PER_FOLD at a time."""
        seen = 0
        for table in import_tables(self._step.folder, self._contents, self._span, COLUMNS):
            start = min(len(table), max(0, self._done - seen))
            seen += len(table)
            for first in range(start, len(table), MAX_ROWS_PER_FOLD):
                yield table.slice(first, MAX_ROWS_PER_FOLD)

    def _outputs(self, rows: pa.Table) -> list[Output]:
        block = as_experiences(rows, self._contents, self._plan, self._done, self._base, wall_ms())
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
    fields = asdict(contents)
    for of_text_views in ("messages", "tokenizer"):  # cannot be imported: ids of earlier releases stay the same
        del fields[of_text_views]
    text = json.dumps(fields, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Converts rows of an exported dataset to experiences of another run: the inverse of `columns.py`.
IMPORTED_VERSION = PolicyVersion(0, 0)
"""The version of imported trajectories: no trainer of this run has epoch 0. Their staleness counts from the first
version of the run, which is a lower bound."""

_REPLACED_FIELDS = {
    "trajectory.prompt.number",
    "trajectory.prompt.purpose",
    "trajectory.prompt.samples",
    "trajectory.prompt.round",
    "trajectory.prompt.policy_version.epoch",
    "trajectory.prompt.policy_version.number",
    "trajectory.member",
    "trajectory.version_spans",
    "trajectory.newest_version.epoch",
    "trajectory.newest_version.number",
    "scored_at",
}
"""Fields that get values of this run instead of the exported ones."""
_ADDED = (
    *("trajectory.prompt.messages", "trajectory.conversations"),
    *("trajectory.conversation_rewards", "conversation_rewards"),
)
"""Lists that datasets of earlier releases lack."""
_POSITION = ("kafka_partition", "kafka_offset", "kafka_row")
COLUMNS = pa.schema(
    [
        *(
            row_schema(EXPERIENCES).field(dataset_name(Experience, field.name))
            for field in arrow_schema(Experience)
            if field.name not in _REPLACED_FIELDS
        ),
        *(LOG_POSITION.field(name) for name in _POSITION),
    ]
)
"""The columns that are read from a dataset."""


def as_experiences(rows: pa.Table, contents: Contents, plan: ImportPlan, first: int, base: int, now: int) -> Block:
    """The experiences of `rows` (columns COLUMNS), which are the rows of `plan` from index `first` on.

    `base` is how many groups the run has imported before. A prompt's `round` is the origin of its row. `now`, in Unix
    milliseconds, becomes `scored_at`. Raises ExportError if a row has null in a required column.
    """
    batch = rows.combine_chunks()
    count, planned = len(batch), slice(first, first + len(batch))
    lengths = pc.list_value_length(_column(batch, "completion_token_ids"))
    columns = {
        "trajectory.prompt.number": pa.array(plan.numbers[planned] + base),
        "trajectory.prompt.purpose": pa.repeat("imported", count),
        "trajectory.prompt.samples": pa.array(plan.sizes[planned]),
        "trajectory.prompt.round": _origins(batch, contents),
        "trajectory.member": pa.array(plan.members[planned]),
        "trajectory.version_spans": _one_span(lengths),
        "trajectory.newest_version.epoch": pa.repeat(IMPORTED_VERSION.epoch, count),
        "trajectory.newest_version.number": pa.repeat(IMPORTED_VERSION.number, count),
        "scored_at": pa.repeat(now, count),
    }
    converted = {}
    for field in arrow_schema(Experience):
        values = columns.get(field.name)
        if values is None and field.name in _REPLACED_FIELDS:
            values = pa.nulls(count, field.type)
        elif values is None:
            values = _column(batch, dataset_name(Experience, field.name))
            if field.name in _ADDED:
                values = pc.if_else(values.is_valid(), values, pa.scalar([], values.type))
        if not field.nullable and values.null_count:
            name = dataset_name(Experience, field.name)
            raise ExportError(f"{values.null_count} rows have no {name}, which an experience must have")
        converted[field.name] = values.cast(field.type)
    return Block.from_columns(Experience, converted)


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table[name]
    values = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    return values.cast(pa.int64()) if pa.types.is_timestamp(values.type) else values


def _origins(rows: pa.Table, contents: Contents) -> pa.Array:
    """The origin of each row: `first/experiences 0:17.3` is row 3 of the record at offset 17 of partition 0."""
    partition, offset, row = (_column(rows, name).cast(pa.utf8()) for name in _POSITION)
    where = pc.binary_join_element_wise(f"{contents.run}/{contents.topic} ", partition, "")
    return pc.binary_join_element_wise(pc.binary_join_element_wise(where, offset, ":"), row, ".")


def _one_span(lengths: pa.Array) -> pa.Array:
    """Version spans of rows with `lengths` tokens: one span of all tokens, or none without tokens."""
    kind = arrow_schema(Experience).field("trajectory.version_spans").type
    version = {"epoch": IMPORTED_VERSION.epoch, "number": IMPORTED_VERSION.number}
    return pa.array(
        [[{"version": version, "length": length}] if length else [] for length in lengths.to_pylist()], kind
    )
