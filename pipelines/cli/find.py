"""`laminar topics find` and `stats`: rows of a topic by what is in them, and what a topic holds in all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import typer

from infra.kafka.reading import schema_of
from operators.export.columns import PLACE, row_schema
from operators.export.formats import plain
from operators.export.where import parse_where
from pipelines.cli.options import Address
from pipelines.cli.read_options import ReadOptions
from pipelines.cli.topic_names import TopicArgument, known_topic
from pipelines.inspect.log.chunks import LogChunk, read_chunks
from pipelines.present.output import Chunks, Report, RowOutput, arrow_stream, utc
from pipelines.present.record_text import brief
from schemas.topics import Topic

FIGURES = ("policy_version", "staleness", "reward", "prompt_tokens", "completion_tokens", "tokens", "lease", "batch")
"""Columns whose range `stats` tells, where a topic has them."""


def find_command(
    topic: TopicArgument,
    reading: ReadOptions,
    address: Address,
    where: Annotated[
        str, typer.Option("--where", "-w", metavar="CONDITION", help="reward > 0.5 and task in ('gcd', 'sums').")
    ] = "",
    columns: Annotated[
        str | None, typer.Option("--columns", metavar="A,B", help="Only these columns; by default all that are set.")
    ] = None,
    count: Annotated[int | None, typer.Option("-n", "--count", min=0, help="At most so many rows.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what comes.")] = False,
) -> RowOutput | Chunks:
    """Find rows of a topic by their fields. Joins no group, commits nothing; memory stays flat on any length.

    Columns are those of `laminar export`; a wrong name is answered with the nearest.

    \b
    Examples:
      laminar topics find experiences -w "reward > 0.5 and staleness >= 2" --columns trajectory_id,reward
      laminar topics find settled -w "outcome = 'dropped'" -o @-1h -o csv
      laminar topics find trajectories -w "completion_text ~ 'sorry'" -n 5 -o jsonl
    """
    to = address.connect()
    name, known = known_topic(topic, to.run)
    try:
        condition = parse_where(where, row_schema(known)) if where else None
        wanted = _columns(columns, known)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    ranges = reading.ranges(to, name)

    def tables() -> Iterator[pa.Table]:
        left = count
        for chunk in read_chunks(to.client, known, name, ranges, follow=follow):
            found = chunk.table()
            rows = found if condition is None else condition.rows(found)
            rows = rows if left is None else rows.slice(0, left)
            if len(rows):
                yield rows.select(wanted) if wanted else rows
            if left is not None and (left := left - len(rows)) <= 0:
                return

    form = reading.form("lines")
    if form == "arrow":
        return Chunks(arrow_stream(tables()))
    parts = ([plain(row) for row in batch.to_pylist()] for each in tables() for batch in each.to_batches(256))
    return RowOutput(parts, wanted or None, form, "no such rows", lambda row: _line(dict(row)))


def stats_command(topic: TopicArgument, reading: ReadOptions, address: Address) -> Report | RowOutput:
    """Count what a topic holds: records by schema, rows, bytes, times, and the range of what matters of its rows.

    As a table, CSV or Arrow: only the ranges.

    \b
    Examples:
      laminar topics stats experiences
      laminar topics stats settled -o @-10m --json | jq .figures
    """
    to = address.connect()
    name, known = known_topic(topic, to.run)
    form = reading.form("lines", json="json")
    counted = _Counted(known)
    for chunk in read_chunks(to.client, known, name, reading.ranges(to, name)):
        counted.add(chunk)
    data = {"topic": name, **counted.facts()}
    if form in ("table", "csv", "csv-raw", "arrow", "jsonl"):
        figures = [{"column": column, **figure} for column, figure in data["figures"].items()]
        return RowOutput([figures], None, form, f"{name} holds no records there")
    return Report(data, lambda: _statistics(data), as_json=form == "json")


class _Counted:
    """What `stats` says, gathered chunk by chunk."""

    def __init__(self, topic: Topic) -> None:
        self._figures: dict[str, list[Any]] = {name: [] for name in FIGURES if name in row_schema(topic).names}
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
        for name, seen in self._figures.items():
            column = rows[name]
            if held := len(column) - column.null_count:
                ends = pc.min_max(column).as_py()
                seen.append((ends["min"], pc.sum(column).as_py(), ends["max"], held))

    def facts(self) -> dict[str, Any]:
        """Everything, JSON-ready. Times are Unix milliseconds."""
        figures = {
            name: {
                "min": min(low for low, *_ in seen),
                "mean": sum(total for _, total, _, _ in seen) / sum(held for *_, held in seen),
                "max": max(high for _, _, high, _ in seen),
            }
            for name, seen in self._figures.items()
            if seen
        }
        return {
            "records": self._records,
            "rows": self._rows,
            "bytes": self._bytes,
            "undecodable": self._undecodable,
            "schemas": dict(self._schemas),
            "first_at": self._times[0] if self._times else None,
            "last_at": self._times[1] if self._times else None,
            "figures": figures,
        }


def _statistics(data: dict[str, Any]) -> str:
    if not data["records"]:
        return f"{data['topic']} holds no records there"
    schemas = ", ".join(f"{count:,} {schema}" for schema, count in data["schemas"].items())
    lines = [
        f"{data['topic']}: {data['records']:,} records ({schemas}), {data['rows']:,} rows, "
        f"{data['bytes'] / 1e6:,.1f} MB",
        f"  written {utc(data['first_at'])} to {utc(data['last_at'])}; {data['undecodable']} undecodable",
    ]
    for name, figure in data["figures"].items():
        lines.append(f"  {name:18} {figure['min']:g} to {figure['max']:g}, mean {figure['mean']:.4g}")
    return "\n".join(lines)


def _columns(text: str | None, topic: Topic) -> list[str]:
    """The columns that `text` names. Raises ValueError naming the nearest of one that is not there."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        parse_where(f"{name} is null", row_schema(topic))
    return names


def _line(row: dict[str, Any]) -> str:
    where = [row.pop(name, None) for name in PLACE.names]
    place = f"{where[1]}:{where[2]} " if where[2] is not None else ""
    return place + brief(row)
