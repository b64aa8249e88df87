"""The results of commands, and the only place that prints them: tables for people; JSON, CSV or Arrow for tools.

Every format escapes control characters; CSV also puts a quote before cells that a spreadsheet would execute. `csv-raw`
and Arrow contain text unchanged.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import orjson
import typer
from rich.table import Table

from infra.escaping import escape_control_characters, escape_csv_cell, escape_json, escape_keeping_nul
from pipelines.present.view.console import console

Row = Mapping[str, Any]
Form = Literal["table", "lines", "json", "jsonl", "csv", "csv-raw", "arrow"]


@dataclass(frozen=True)
class Report:
    """The whole result of a command: `--json` prints `data`; otherwise `text` returns a string or table for people."""

    data: Any
    text: Callable[[], Any]
    as_json: bool = False
    exit_code: int = 0


@dataclass(frozen=True)
class RowOutput:
    """A result of JSON-ready rows, printed part by part: memory use does not grow with their number.

    `columns` are the columns of a table; None: every column that is set in the first part. `cells` returns the table
    cells of a row, `line` its line. `none` is the text for a result without rows. `schema` returns the Arrow schema;
    without one the first part determines it. With one, what a row lacks is null.
    """

    parts: Iterable[Sequence[Row]]
    columns: Sequence[str] | None
    form: Form
    none: str = ""
    line: Callable[[Row], str] = str
    cells: Callable[[Row], Row] = lambda row: row
    schema: Callable[[], Any] | None = None
    exit_code: int = 0


@dataclass(frozen=True)
class Texts:
    """A result for people only: strings, tables or Rich texts, each printed as soon as it is ready."""

    parts: Iterable[Any]


@dataclass(frozen=True)
class Chunks:
    """A result for tools only: bytes, printed unchanged."""

    parts: Iterable[bytes]


def table(rows: Iterable[Row], columns: Sequence[str], title: str = "", head: bool = True) -> Table:
    """Return a table of `rows` with a column for each key of `columns`; numbers are right-aligned."""
    listed = list(rows)
    result = Table(
        title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold", show_header=head
    )
    for name in columns:
        numeric = any(isinstance(row.get(name), int | float) for row in listed)
        result.add_column(name.upper().replace("_", "-"), justify="right" if numeric else "left", overflow="fold")
    for row in listed:
        result.add_row(*[_cell(row.get(name)) for name in columns])
    return result


def show(result: Any) -> None:
    """Print the result of a command. Raises typer.Exit with its exit code if that is not 0."""
    if isinstance(result, RowOutput):
        _PRINT[result.form](result)
    elif isinstance(result, Report):
        if result.as_json:
            sys.stdout.write(escape_json(json.dumps(result.data, ensure_ascii=False, indent=1)) + "\n")
            sys.stdout.flush()  # a closed pipe is an error here, not at the end of the process
        else:
            _print(result.text())
    elif isinstance(result, Texts):
        for part in result.parts:
            _print(part)
    elif isinstance(result, Chunks):
        _write(result.parts)
    elif result is not None:
        raise TypeError(
            f"a command returned {type(result).__name__}; it must return a result class of `output`, or None"
        )
    if getattr(result, "exit_code", 0):
        raise typer.Exit(result.exit_code)


def _table(result: RowOutput) -> None:
    columns, empty = result.columns, True
    for part in result.parts:
        if part:
            columns = columns or [name for name in part[0] if any(row.get(name) is not None for row in part)]
            _print(table(map(result.cells, part), columns, head=empty))
            empty = False
    if empty and result.none:
        _print(result.none)


def _lines(result: RowOutput) -> None:
    empty = True
    for part in result.parts:
        sys.stdout.write("".join([f"{escape_keeping_nul(result.line(row))}\n" for row in part]))
        sys.stdout.flush()
        empty = empty and not part
    if empty and result.none:
        sys.stderr.write(f"{escape_control_characters(result.none)}\n")  # stdout is for tools such as `wc -l`


def _objects(result: RowOutput) -> None:
    for part in result.parts:
        sys.stdout.write("".join([f"{escape_json(compact(row))}\n" for row in part]))
        sys.stdout.flush()


def _array(result: RowOutput) -> None:
    empty = True
    for part in result.parts:
        for row in part:
            sys.stdout.write(("[\n" if empty else ",\n") + escape_json(compact(row)))
            empty = False
        sys.stdout.flush()
    sys.stdout.write(escape_json("[]\n" if empty else "\n]\n"))
    sys.stdout.flush()


def _csv(result: RowOutput, text: Callable[[str], str] = escape_csv_cell) -> None:
    import csv

    def cell(value: Any) -> Any:
        value = compact(value) if isinstance(value, list | dict) else value
        return text(value) if isinstance(value, str) else value

    writer, names = None, list(result.schema().names) if result.schema is not None else None
    for part in result.parts:
        for row in part:
            if writer is None:
                writer = csv.DictWriter(sys.stdout, names or list(row), lineterminator="\n")
                writer.writerow({name: text(name) for name in names or row})
            writer.writerow({name: cell(value) for name, value in row.items()})
        sys.stdout.flush()


def _arrow(result: RowOutput) -> None:
    import pyarrow as pa

    def tables() -> Iterable[Any]:
        schema = None if result.schema is None else result.schema()
        for part in result.parts:
            if part:
                rows = pa.Table.from_pylist(list(part), schema=schema)
                schema = rows.schema
                yield rows

    _write(arrow_stream(tables()))


def arrow_stream(tables: Iterable[Any]) -> Iterable[bytes]:
    """Yield tables of one schema as an Arrow IPC stream."""
    import io

    import pyarrow as pa

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


_PRINT: Mapping[Form, Callable[[RowOutput], None]] = {
    "table": _table,
    "lines": _lines,
    "json": _array,
    "jsonl": _objects,
    "csv": _csv,
    "csv-raw": lambda result: _csv(result, str),
    "arrow": _arrow,
}


def _print(text: Any) -> None:
    # Output to a pipe is for tools: do not wrap it.
    shown = console(soft_wrap=True) if sys.stdout.isatty() else console(width=1000, soft_wrap=True)
    shown.print(text, highlight=False, markup=False)


def _write(parts: Iterable[bytes]) -> None:
    for part in parts:
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()


def utc(milliseconds: int) -> str:
    """Return a Unix time in milliseconds as text, in UTC."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def compact(value: Any) -> str:
    """Return the JSON-ready `value` as JSON on one line; numbers that JSON cannot represent are null."""
    return orjson.dumps(value).decode()


def rounded(value: float) -> str:
    """Return a number with six significant digits, without an exponent where there are more before the point."""
    return f"{value:.0f}" if 1e6 <= abs(value) < 1e15 else f"{value:.6g}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, list | dict):
        return escape_json(compact(value))
    return "yes" if value is True else "no" if value is False else escape_control_characters(str(value))
