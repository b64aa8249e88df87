"""`laminar topics find` and `stats`: rows of a topic by what is in them, and what a topic holds in all."""

from __future__ import annotations

import csv
import io
import json as jsons
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import typer

from infra.kafka.offset_span import parse_span
from infra.kafka.reading import resolve_span
from infra.runners.collector import collect_seldom
from operators.export.columns import PLACE, row_schema
from operators.export.formats import plain
from operators.export.where import parse_where
from pipelines.cli.options import BrokersOption, JsonOption, PropertiesOption, RunOption, connect
from pipelines.cli.output import Chunks, Report, Stream, table
from pipelines.cli.record_tables import read_chunks
from pipelines.cli.record_text import brief, utc
from pipelines.cli.topic_names import TopicArgument, full_name
from schemas.topics import CATALOGUE, Topic, run_of, run_prefix

OffsetsOption = Annotated[
    list[str] | None,
    typer.Option("-o", "--offset", metavar="OFFSET", help="N, -N, +N, N:M, beginning, end, s@MS, e@MS, @-1h, @T1:T2."),
]
PartitionsOption = Annotated[
    str | None, typer.Option("-p", "--partitions", metavar="0,1", help="Only these partitions.")
]
Output = Literal["lines", "table", "json", "jsonl", "csv", "arrow"]
FIGURES = ("policy_version", "staleness", "reward", "prompt_tokens", "completion_tokens", "tokens", "lease", "batch")
"""Columns whose range `stats` tells, where a topic has them."""


def find_command(
    topic: TopicArgument,
    where: Annotated[
        str, typer.Option("--where", "-w", metavar="CONDITION", help="reward > 0.5 and task in ('gcd', 'sums').")
    ] = "",
    columns: Annotated[
        str | None, typer.Option("--columns", metavar="A,B", help="Only these columns; by default all that are set.")
    ] = None,
    count: Annotated[int | None, typer.Option("-n", "--count", min=0, help="At most so many rows.")] = None,
    offset: OffsetsOption = None,
    partitions: PartitionsOption = None,
    output: Annotated[Output, typer.Option("--output", "-O", help="How rows are printed.")] = "lines",
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what comes.")] = False,
    run: RunOption = None,
    brokers: BrokersOption = None,
    command_config: PropertiesOption = None,
) -> Stream | Report | Chunks:
    """Find rows of a topic by their fields. Joins no group, commits nothing; memory stays flat on any length.

    Columns are those of `laminar export`; a wrong name is answered with the nearest.

    \b
    Examples:
      laminar topics find experiences -w "reward > 0.5 and staleness >= 2" --columns trajectory_id,reward
      laminar topics find settled -w "fate = 'dropped'" -o @-1h -O csv
      laminar topics find trajectories -w "completion_text ~ 'sorry'" -n 5 -O jsonl
    """
    to = connect(run, brokers, command_config)
    name = full_name(topic, to.run)
    known = CATALOGUE[name.removeprefix(run_prefix(run_of(name) or to.run))]
    try:
        condition = parse_where(where, row_schema(known)) if where else None
        span = parse_span(offset or (), time.time_ns() // 1_000_000)
        wanted = _columns(columns, known)
        parts = None if partitions is None else [int(part) for part in partitions.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    ranges = resolve_span(to.client, name, span, parts)

    def tables() -> Iterator[pa.Table]:
        collect_seldom()
        left = count
        for chunk in read_chunks(to.client, known, name, ranges, follow=follow):
            rows = chunk.rows if condition is None else condition.rows(chunk.rows)
            rows = rows if left is None else rows.slice(0, left)
            if len(rows):
                yield rows.select(wanted) if wanted else rows
            if left is not None and (left := left - len(rows)) <= 0:
                return

    return _printed(tables(), output, wanted)


def stats_command(
    topic: TopicArgument,
    offset: OffsetsOption = None,
    partitions: PartitionsOption = None,
    run: RunOption = None,
    brokers: BrokersOption = None,
    command_config: PropertiesOption = None,
    json: JsonOption = False,
) -> Report:
    """Count what a topic holds: records by schema, rows, bytes, times, and the range of what matters of its rows.

    \b
    Examples:
      laminar topics stats experiences
      laminar topics stats settled -o @-10m --json | jq .figures
    """
    to = connect(run, brokers, command_config)
    name = full_name(topic, to.run)
    known = CATALOGUE[name.removeprefix(run_prefix(run_of(name) or to.run))]
    try:
        span = parse_span(offset or (), time.time_ns() // 1_000_000)
        parts = None if partitions is None else [int(part) for part in partitions.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    collect_seldom()
    counted = _Counted(known)
    for chunk in read_chunks(to.client, known, name, resolve_span(to.client, name, span, parts)):
        counted.add(chunk.records, chunk.rows)
    data = {"topic": name, **counted.facts()}
    return Report(data, lambda: _statistics(data), as_json=json)


class _Counted:
    """What `stats` says, gathered chunk by chunk."""

    def __init__(self, topic: Topic) -> None:
        self._figures: dict[str, list[Any]] = {name: [] for name in FIGURES if name in row_schema(topic).names}
        self._schemas: Counter[str] = Counter()
        self._records = self._rows = self._bytes = self._undecodable = 0
        self._times: list[int] = []

    def add(self, records: Sequence[Any], rows: pa.Table) -> None:
        self._records += len(records)
        self._rows += len(rows)
        self._bytes += sum(record.size for record in records)
        self._undecodable += sum(record.error is not None for record in records)
        self._schemas.update(record.schema or "none" for record in records)
        times = [record.timestamp for record in records]
        self._times = [min([*self._times[:1], *times]), max([*self._times[1:], *times])]
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


def _printed(tables: Iterator[pa.Table], output: Output, columns: Sequence[str]) -> Stream | Report | Chunks:
    rows = (plain(row) for each in tables for batch in each.to_batches(max_chunksize=256) for row in batch.to_pylist())
    if output == "lines":
        return Stream(rows, lambda row: _line(dict(row)))
    if output == "jsonl":
        return Stream(rows, str, as_json=True)
    if output == "csv":
        return Chunks(_csv(rows))
    if output == "arrow":
        return Chunks(_arrow(tables))
    listed = list(rows)
    shown = list(columns) or sorted({name for row in listed for name, value in row.items() if value is not None})
    cells = [
        {name: jsons.dumps(row[name]) if isinstance(row[name], list | dict) else row[name] for name in shown}
        for row in listed
    ]
    return Report(listed, lambda: table(cells, shown) if cells else "no such rows", as_json=output == "json")


def _line(row: dict[str, Any]) -> str:
    where = [row.pop(name, None) for name in PLACE.names]
    place = f"{where[1]}:{where[2]} " if where[2] is not None else ""
    return place + brief(row)


def _csv(rows: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    head: list[str] = []
    for row in islice(rows, None):
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        if not head:
            head = list(row)
            writer.writerow(head)
        writer.writerow([jsons.dumps(v) if isinstance(v, list | dict) else v for v in row.values()])
        yield out.getvalue().encode()


def _arrow(tables: Iterator[pa.Table]) -> Iterator[bytes]:
    """An Arrow IPC stream, a table at a time."""
    sink = io.BytesIO()
    writer = None
    for each in tables:
        writer = writer or pa.ipc.new_stream(sink, each.schema)
        writer.write_table(each)
        yield sink.getvalue()
        sink.seek(0)
        sink.truncate()
    if writer is not None:
        writer.close()
        yield sink.getvalue()
