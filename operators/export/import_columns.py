"""Converts rows of an exported dataset to experiences of another run: the inverse of `columns.py`."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from operators.export.columns import LOG_POSITION, dataset_name, row_schema
from operators.export.config import Contents
from operators.export.folder import ExportError
from operators.export.import_plan import ImportPlan
from schemas.arrow import arrow_schema
from schemas.block import Block
from schemas.records import Experience, PolicyVersion
from schemas.topics import EXPERIENCES

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
_ADDED = ("trajectory.prompt.messages", "trajectory.conversations")
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
