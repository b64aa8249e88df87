"""Rows of an exported dataset as experience of another run: the columns of `columns.py`, read the other way."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from operators.export.columns import PLACE, dataset_name, row_schema
from operators.export.config import Contents
from operators.export.folder import ExportError
from operators.export.import_plan import ImportPlan
from schemas.arrow import arrow_schema
from schemas.block import Block
from schemas.records import Experience, PolicyVersion
from schemas.topics import EXPERIENCES

BEFORE_ALL = PolicyVersion(0, 0)
"""Under which imported trajectories were made: no trainer of this run's has epoch 0. Their staleness counts from the
run's beginning, the least that it can be."""

_OURS = {
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
"""What this run says of a row, whatever the other said."""
_PLACES = ("kafka_partition", "kafka_offset", "kafka_row")
COLUMNS = pa.schema(
    [
        *(
            row_schema(EXPERIENCES).field(dataset_name(Experience, field.name))
            for field in arrow_schema(Experience)
            if field.name not in _OURS
        ),
        *(PLACE.field(name) for name in _PLACES),
    ]
)
"""What is read of a dataset."""


def as_experiences(rows: pa.Table, contents: Contents, plan: ImportPlan, first: int, base: int, now: int) -> Block:
    """`rows`, of COLUMNS, which `plan` has from its row `first` on, in a run that has `base` imported groups.

    Their prompts' round says where each stood; `now`, in Unix milliseconds, is when they were scored as far as this
    run's buffer is concerned. Raises ExportError where a row lacks what a record must have.
    """
    batch = rows.combine_chunks()
    count, place = len(batch), slice(first, first + len(batch))
    lengths = pc.list_value_length(_column(batch, "completion_token_ids"))
    columns = {
        "trajectory.prompt.number": pa.array(plan.numbers[place] + base),
        "trajectory.prompt.purpose": pa.repeat("imported", count),
        "trajectory.prompt.samples": pa.array(plan.sizes[place]),
        "trajectory.prompt.round": _origins(batch, contents),
        "trajectory.member": pa.array(plan.members[place]),
        "trajectory.version_spans": _one_span(lengths),
        "trajectory.newest_version.epoch": pa.repeat(BEFORE_ALL.epoch, count),
        "trajectory.newest_version.number": pa.repeat(BEFORE_ALL.number, count),
        "scored_at": pa.repeat(now, count),
    }
    made = {}
    for field in arrow_schema(Experience):
        values = columns.get(field.name)
        if values is None and field.name in _OURS:
            values = pa.nulls(count, field.type)
        elif values is None:
            values = _column(batch, dataset_name(Experience, field.name))
        if not field.nullable and values.null_count:
            name = dataset_name(Experience, field.name)
            raise ExportError(f"{values.null_count} rows have no {name}, which an experience must have")
        made[field.name] = values.cast(field.type)
    return Block.from_columns(Experience, made)


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table[name]
    values = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    return values.cast(pa.int64()) if pa.types.is_timestamp(values.type) else values


def _origins(rows: pa.Table, contents: Contents) -> pa.Array:
    """Where each row stood: `first/experiences 0:17.3` is row 3 of the record at offset 17 of partition 0."""
    partition, offset, row = (_column(rows, name).cast(pa.utf8()) for name in _PLACES)
    where = pc.binary_join_element_wise(f"{contents.run}/{contents.topic} ", partition, "")
    return pc.binary_join_element_wise(pc.binary_join_element_wise(where, offset, ":"), row, ".")


def _one_span(lengths: pa.Array) -> pa.Array:
    """Version spans of rows with `lengths` tokens: one of all where there are any."""
    kind = arrow_schema(Experience).field("trajectory.version_spans").type
    version = {"epoch": BEFORE_ALL.epoch, "number": BEFORE_ALL.number}
    return pa.array(
        [[{"version": version, "length": length}] if length else [] for length in lengths.to_pylist()], kind
    )
