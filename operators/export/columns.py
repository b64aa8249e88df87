"""Records as the columns of a dataset: readable names, and types that every Arrow and Parquet reader supports.

A column of the dataset is a column of the record or is computed from columns; no row object is built. Columns are added
but never changed, so files of different releases can be read together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from schemas.arrow import arrow_schema
from schemas.block import Block
from schemas.identity import LETTERS
from schemas.records import Experience, Trajectory
from schemas.topics import Topic

SCHEMA_VERSION = 1
"""Written to the metadata of every file."""

LOG_POSITION = pa.schema(
    [
        pa.field("kafka_topic", pa.utf8(), nullable=False),
        pa.field("kafka_partition", pa.int32(), nullable=False),
        pa.field("kafka_offset", pa.int64(), nullable=False),
        pa.field("kafka_row", pa.int32(), nullable=False),
        pa.field("kafka_timestamp", pa.timestamp("ms", tz="UTC"), nullable=False),
    ]
)
"""The position of a row in the log. Several rows may share a Kafka record; `kafka_row` is the index in it."""
RECORD = "record"
"""The column with the record class of a row, in topics with several classes."""

_NAMES: Mapping[str, str] = {
    "prompt.purpose": "purpose",
    "prompt.task": "task",
    "prompt.reference": "ground_truth",
    "prompt.samples": "group_size",
    "prompt.round": "evaluation_round",
    "prompt.policy_version.epoch": "pinned_epoch",
    "prompt.policy_version.number": "pinned_version",
    "newest_version.epoch": "newest_epoch",
    "newest_version.number": "newest_version",
    "response.token_ids": "completion_token_ids",
    "response.logprobs": "completion_logprobs",
    "response.loss_mask": "completion_mask",
    "text": "completion_text",
}
_SAMPLING = "prompt.sampling."
_PURPOSES, _LETTERS = pa.array(list(LETTERS)), pa.array(list(LETTERS.values()))


class Column(NamedTuple):
    """A column of the dataset, and the function that makes it from the columns of a record."""

    field: pa.Field
    make: Callable[[pa.RecordBatch], pa.Array]


def dataset_name(kind: type, path: str) -> str:
    """The name in a dataset of column `path` of record class `kind`."""
    if kind is Experience and not path.startswith("trajectory."):
        return {"error": "reward_error", "components": "reward_components"}.get(path, path)
    if kind in (Experience, Trajectory):
        path = path.removeprefix("trajectory.")
        path = "reported_rewards" if path == "conversation_rewards" else path
        path = _NAMES.get(path, path.removeprefix("prompt.") if path.startswith(_SAMPLING) else path)
    return path.replace(".", "_")


@cache
def columns_of(kind: type) -> tuple[Column, ...]:
    """The columns of records of class `kind`: computed ones first, then every field."""
    computed = _computed("trajectory." if kind is Experience else "") if kind in (Experience, Trajectory) else ()
    return (*computed, *(_plain(kind, field) for field in arrow_schema(kind)))


@cache
def row_schema(topic: Topic) -> pa.Schema:
    """The columns of a dataset of `topic`: those of all its record classes, and the position in the log."""
    schemas = [pa.schema([column.field for column in columns_of(kind)]) for kind in topic.record_classes]
    own = pa.unify_schemas(schemas)
    named = [pa.field(RECORD, pa.utf8())] if len(topic.record_classes) > 1 else []
    return pa.schema([*named, *own, *LOG_POSITION], metadata={"laminar": f"{topic.short_name}/{SCHEMA_VERSION}"})


class RecordRows(NamedTuple):
    """The rows of consecutive Kafka records, with the offset, timestamp (Unix milliseconds) and row count of each."""

    block: Block
    offsets: Sequence[int]
    timestamps: Sequence[int]
    counts: Sequence[int]

    @classmethod
    def of_one(cls, block: Block, offset: int, timestamp: int) -> RecordRows:
        return cls(block, (offset,), (timestamp,), (len(block),))


def as_table(topic: Topic, partition: int, placed: Sequence[RecordRows]) -> pa.Table:
    """The rows of `placed`, all of `partition`, in their order, with the columns of `row_schema`."""
    schema = row_schema(topic)
    tables = []
    first = 0
    for last in range(1, len(placed) + 1):  # consecutive blocks of one class are concatenated
        if last == len(placed) or placed[last].block.kind is not placed[first].block.kind:
            tables.append(_of_one_kind(topic, schema, partition, placed[first:last]))
            first = last
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _of_one_kind(topic: Topic, schema: pa.Schema, partition: int, placed: Sequence[RecordRows]) -> pa.Table:
    block = Block.concat([each.block for each in placed])
    rows = len(block)
    made = {column.field.name: column.make(block.batch) for column in columns_of(block.kind)}
    counts, offsets, timestamps = (
        pa.array(list(chain.from_iterable(values)), pa.int64())
        for values in zip(*[(each.counts, each.offsets, each.timestamps) for each in placed], strict=True)
    )
    record_of_row = _repeated(counts)
    starts = pc.subtract(pc.cumulative_sum(counts), counts)
    made |= {
        RECORD: pa.repeat(block.kind.__name__, rows),
        "kafka_topic": pa.repeat(topic.short_name, rows),
        "kafka_partition": pa.repeat(pa.scalar(partition, pa.int32()), rows),
        "kafka_offset": offsets.take(record_of_row),
        "kafka_row": pc.subtract(pa.arange(0, rows), starts.take(record_of_row)).cast(pa.int32()),
        "kafka_timestamp": timestamps.take(record_of_row).cast(LOG_POSITION.field("kafka_timestamp").type),
    }
    arrays = [made[field.name] if field.name in made else pa.nulls(rows, field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _repeated(counts: pa.Array) -> pa.Array:
    """Each index i of `counts`, repeated `counts[i]` times."""
    ends = pc.cumulative_sum(counts).cast(pa.int32())
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    return pc.list_parent_indices(pa.ListArray.from_arrays(offsets, pa.nulls(ends[-1].as_py())))


def _plain(kind: type, field: pa.Field) -> Column:
    """A field of the record. Times become timestamps, maps become lists of pairs (some readers do not support maps)."""
    name, path = dataset_name(kind, field.name), field.name
    if pa.types.is_map(field.type):
        pairs = pa.list_(pa.struct([("name", field.type.key_type), ("value", field.type.item_type)]))
        return Column(pa.field(name, pairs), lambda batch: _pairs(batch.column(path), pairs))
    if path.endswith("_at") and field.type == pa.int64():
        time = pa.timestamp("ms", tz="UTC")
        return Column(pa.field(name, time), lambda batch: batch.column(path).cast(time))
    return Column(pa.field(name, field.type), lambda batch: batch.column(path))


def _pairs(column: pa.MapArray, kind: pa.DataType) -> pa.Array:
    pairs = pa.StructArray.from_arrays([column.keys, column.items], fields=list(kind.value_type))
    return pa.ListArray.from_arrays(column.offsets, pairs, type=kind)


def _computed(prefix: str) -> tuple[Column, ...]:
    def at(path: str) -> Callable[[pa.RecordBatch], pa.Array]:
        return lambda batch: batch.column(prefix + path)

    def first(part: str) -> Callable[[pa.RecordBatch], pa.Array]:
        """A part of the version that generated the first token; null without tokens."""

        def make(batch: pa.RecordBatch) -> pa.Array:
            spans = batch.column(f"{prefix}version_spans")
            generated = pc.greater(pc.list_value_length(spans), 0)
            starts = pc.if_else(generated, spans.offsets[:-1], None)
            versions = spans.values.field("version").field(part)
            return versions.take(starts)

        return make

    def group(batch: pa.RecordBatch) -> pa.Array:
        letter = _LETTERS.take(pc.index_in(at("prompt.purpose")(batch), _PURPOSES))
        return pc.binary_join_element_wise(letter, at("prompt.number")(batch).cast(pa.utf8()), "")

    def trajectory(batch: pa.RecordBatch) -> pa.Array:
        return pc.binary_join_element_wise(group(batch), at("member")(batch).cast(pa.utf8()), ".")

    def staleness(batch: pa.RecordBatch) -> pa.Array:
        behind = pc.subtract(at("newest_version.number")(batch), first("number")(batch))
        return pc.max_element_wise(behind, 0, skip_nulls=False)

    def tokens(path: str) -> Callable[[pa.RecordBatch], pa.Array]:
        return lambda batch: pc.list_value_length(at(path)(batch)).cast(pa.int64())

    integer = pa.int64()
    return (
        Column(pa.field("trajectory_id", pa.utf8()), trajectory),
        Column(pa.field("group_id", pa.utf8()), group),
        Column(pa.field("policy_epoch", integer), first("epoch")),
        Column(pa.field("policy_version", integer), first("number")),
        Column(pa.field("staleness", integer), staleness),
        Column(pa.field("prompt_tokens", integer), tokens("prompt.token_ids")),
        Column(pa.field("completion_tokens", integer), tokens("response.token_ids")),
    )
