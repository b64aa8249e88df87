"""`laminar topics find` and `stats`: find rows of a topic by their fields, and count what a topic holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import typer

from infra.conditions.tables import table_condition
from infra.escaping import print_escaped
from infra.kafka.ranges import PartitionRange
from infra.kafka.topic_reader import schema_of
from operators.export.columns import LOG_POSITION, row_schema
from operators.export.formats import json_value
from pipelines.cli.options import Address, FollowOption, RunClient
from pipelines.cli.read_options import ReadOptions
from pipelines.cli.topic_names import TopicArgument, known_topic
from pipelines.inspect.audit.trim_points import newest_trim_point
from pipelines.inspect.log.chunks import LogChunk, read_chunks
from pipelines.present.output import Chunks, Report, RowOutput, arrow_stream, utc
from pipelines.present.record_text import MAX_LINE, brief
from schemas.topics import Topic

STATISTICS = ("policy_version", "staleness", "reward", "prompt_tokens", "completion_tokens", "tokens", "lease", "batch")
"""Columns whose range `stats` reports, where a topic has them."""


MAIN_COLUMNS = (
    *("trajectory_id", "task", "policy_version", "staleness", "reward", "completion_tokens", "finish_reason"),
    *("error", "reward_error", "completion_text"),
)
"""What `find` shows people of trajectories and experiences."""


def find_command(
    topic: TopicArgument,
    reading: ReadOptions,
    address: Address,
    where: Annotated[
        str,
        typer.Option(
            "--where", "-w", metavar="CONDITION", help="For example: reward > 0.5 and task in ('gcd', 'sums')."
        ),
    ] = "",
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns",
            metavar="A,B",
            help="Only these columns, or `all`. By default: lines and tables have the main ones, other formats all.",
        ),
    ] = None,
    count: Annotated[int | None, typer.Option("-n", "--count", min=0, help="Maximum number of rows.")] = None,
    follow: FollowOption = False,
) -> RowOutput | Chunks:
    """Find rows of a topic by their fields. Joins no consumer group and commits nothing; memory use is constant.

    The columns are those of `laminar export`; the error for an unknown column suggests the nearest one.

    \b
    Examples:
      laminar topics find experiences -w "reward > 0.5 and staleness >= 2" --columns trajectory_id,reward
      laminar topics find settled -w "outcome = 'dropped'" -o @-1h -O csv
      laminar topics find trajectories -w "completion_text ~ 'sorry'" -n 5
      laminar topics find trajectories --columns all -n 1
    """
    connection = address.open_log()
    name, known = known_topic(topic, connection.run)
    form = reading.form("lines", follow=follow)
    try:
        condition = table_condition(where, row_schema(known)) if where else None
        selected = _columns(columns, known, for_people=form in ("lines", "table"))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    ranges = reading.ranges(connection, name)
    if hint := _trimmed(connection, known, ranges):
        print_escaped(hint, err=True)

    def tables() -> Iterator[pa.Table]:
        remaining = count
        for chunk in read_chunks(connection.client, known, name, ranges, follow=follow):
            decoded = chunk.table()
            rows = decoded if condition is None else condition.rows(decoded)
            rows = rows if remaining is None else rows.slice(0, remaining)
            if len(rows):
                yield rows.select(selected) if selected else rows
            if remaining is not None and (remaining := remaining - len(rows)) <= 0:
                return

    if form == "arrow":
        return Chunks(arrow_stream(tables()))
    parts = ([json_value(row) for row in batch.to_pylist()] for each in tables() for batch in each.to_batches(256))
    return RowOutput(parts, selected or None, form, "no matching rows", lambda row: _line(dict(row)))


def _trimmed(connection: RunClient, topic: Topic, ranges: Mapping[int, PartitionRange]) -> str:
    """Return a note on earlier records that `laminar runs trim` has deleted; empty if `ranges` do not begin there."""
    trim_point = newest_trim_point(connection.client, connection.run)
    if trim_point is None:
        return ""
    cuts = dict(zip(trim_point.partitions, trim_point.offsets, strict=True))
    if not any(0 < cuts.get(f"{topic.short_name}:{number}", 0) >= each.beginning for number, each in ranges.items()):
        return ""
    return (
        f"earlier records of {topic.short_name} were deleted: `laminar runs trim` let the log begin at version "
        f"{trim_point.version} ({utc(trim_point.trimmed_at)} UTC)"
    )


def stats_command(topic: TopicArgument, reading: ReadOptions, address: Address) -> Report | RowOutput:
    """Count what a topic holds: records by schema, rows, bytes, times, and the range of the main columns.

    Tables, CSV and Arrow contain only the ranges.

    \b
    Examples:
      laminar topics stats experiences
      laminar topics stats settled -o @-10m --json | jq .columns
    """
    connection = address.open_log()
    name, known = known_topic(topic, connection.run)
    form = reading.form("lines")
    statistics = _TopicStatistics(known)
    for chunk in read_chunks(connection.client, known, name, reading.ranges(connection, name)):
        statistics.add(chunk)
    data = {"topic": name, **statistics.to_json()}
    if form in ("table", "csv", "csv-raw", "arrow", "jsonl"):
        rows = [{"column": column, **values} for column, values in data["columns"].items()]
        return RowOutput([rows], None, form, f"{name} holds no records in this range")
    return Report(data, lambda: _text(data), as_json=form == "json")


class _TopicStatistics:
    """The statistics of `stats`, collected chunk by chunk."""

    def __init__(self, topic: Topic) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in STATISTICS if name in row_schema(topic).names}
        self._schemas: Counter[str] = Counter()
        self._records = self._rows = self._bytes = self._undecodable = 0
        self._times: list[int] = []

    def add(self, chunk: LogChunk) -> None:
        records, rows = chunk.records, chunk.table()
        self._records += len(records)
        self._rows += len(rows)
        self._bytes += sum(len(value or b"") for value in records.values)
        self._undecodable += sum(error is not None for error in chunk.errors)
        for headers, count in Counter(records.headers).items():
            self._schemas[schema_of(headers) or "none"] += count
        self._times = [min([*self._times[:1], *records.timestamps]), max([*self._times[1:], *records.timestamps])]
        for name, parts in self._columns.items():
            column = rows[name]
            if number := len(column) - column.null_count:
                ends = pc.min_max(column).as_py()
                parts.append((ends["min"], pc.sum(column).as_py(), ends["max"], number))

    def to_json(self) -> dict[str, Any]:
        """Return all statistics, JSON-ready. Times are Unix milliseconds."""
        columns = {
            name: {
                "min": min(low for low, *_ in parts),
                "mean": sum(total for _, total, _, _ in parts) / sum(number for *_, number in parts),
                "max": max(high for _, _, high, _ in parts),
            }
            for name, parts in self._columns.items()
            if parts
        }
        return {
            "records": self._records,
            "rows": self._rows,
            "bytes": self._bytes,
            "undecodable": self._undecodable,
            "schemas": dict(self._schemas),
            "first_at": self._times[0] if self._times else None,
            "last_at": self._times[1] if self._times else None,
            "columns": columns,
        }


def _text(data: dict[str, Any]) -> str:
    if not data["records"]:
        return f"{data['topic']} holds no records in this range"
    schemas = ", ".join(f"{count:,} {schema}" for schema, count in data["schemas"].items())
    lines = [
        f"{data['topic']}: {data['records']:,} records ({schemas}), {data['rows']:,} rows, "
        f"{data['bytes'] / 1e6:,.1f} MB",
        f"  written {utc(data['first_at'])} to {utc(data['last_at'])}; {data['undecodable']} undecodable",
    ]
    for name, values in data["columns"].items():
        lines.append(f"  {name:18} {values['min']:g} to {values['max']:g}, mean {values['mean']:.4g}")
    return "\n".join(lines)


def _columns(text: str | None, topic: Topic, *, for_people: bool) -> list[str]:
    """Return the columns that `text` lists; none: all. Raises ValueError for an unknown one."""
    schema = row_schema(topic)
    if text is None and for_people:
        flat = [field.name for field in schema if not pa.types.is_nested(field.type)]
        main = [name for name in MAIN_COLUMNS if name in flat] if "completion_text" in flat else flat
        return [*main, *(name for name in LOG_POSITION.names if name not in main)]
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if names == ["all"]:
        return []
    for name in names:
        table_condition(f"{name} is null", schema)
    return names


def _line(row: dict[str, Any]) -> str:
    _, partition, offset, *_ = [row.pop(name, None) for name in LOG_POSITION.names]
    position = f"{partition}:{offset} " if offset is not None else ""
    line = position + brief(row)
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 1]}…"
