"""What commands return, and the one place that prints it: tables for people, JSON, CSV or Arrow for tools.

In every form control characters are spelt out; in CSV a quote goes before what a spreadsheet would execute.
`csv-raw` and Arrow carry text as it is.
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
    """The whole answer of a command: `data` is what `--json` prints, `text` makes a string or table for people."""

    data: Any
    text: Callable[[], Any]
    as_json: bool = False
    exit_code: int = 0


@dataclass(frozen=True)
class RowOutput:
    """An answer of JSON-ready rows, printed part by part, so that no form of it takes memory by its length.

    `columns` are those of a table, where None is every one of the first part that is set; `shown` makes of a row what
    stands in its cells, `line` a line; `none` is what people read where there are no rows. Without `schema` (Arrow's)
    the first part says what rows are.
    """

    parts: Iterable[Sequence[Row]]
    columns: Sequence[str] | None
    form: Form
    none: str = ""
    line: Callable[[Row], str] = str
    shown: Callable[[Row], Row] = lambda row: row
    schema: Any = None
    exit_code: int = 0


@dataclass(frozen=True)
class Texts:
    """An answer for people alone: strings, tables or texts, each printed when it comes."""

    parts: Iterable[Any]


@dataclass(frozen=True)
class Chunks:
    """An answer in a format of its own, as bytes for tools."""

    parts: Iterable[bytes]


def table(rows: Iterable[Row], columns: Sequence[str], title: str = "", head: bool = True) -> Table:
    """A table of `rows`, with a column for each key of `columns`; numbers stand right."""
    listed = list(rows)
    made = Table(
        title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold", show_header=head
    )
    for name in columns:
        numeric = any(isinstance(row[name], int | float) for row in listed)
        made.add_column(name.upper().replace("_", "-"), justify="right" if numeric else "left", overflow="fold")
    for row in listed:
        made.add_row(*[_cell(row[name]) for name in columns])
    return made


def show(result: Any) -> None:
    """Print what a command returned. Raises typer.Exit with its exit code where that is not 0."""
    if isinstance(result, RowOutput):
        _PRINT[result.form](result)
    elif isinstance(result, Report):
        if result.as_json:
            sys.stdout.write(escape_json(json.dumps(result.data, ensure_ascii=False, indent=1)) + "\n")
        else:
            _print(result.text())
    elif isinstance(result, Texts):
        for part in result.parts:
            _print(part)
    elif isinstance(result, Chunks):
        _write(result.parts)
    elif result is not None:
        raise TypeError(f"a command returned {type(result).__name__}; it must return what `output` knows, or None")
    if getattr(result, "exit_code", 0):
        raise typer.Exit(result.exit_code)


def _table(answer: RowOutput) -> None:
    columns, empty = answer.columns, True
    for part in answer.parts:
        if part:
            columns = columns or [name for name in part[0] if any(row[name] is not None for row in part)]
            _print(table(map(answer.shown, part), columns, head=empty))
            empty = False
    if empty and answer.none:
        _print(answer.none)


def _lines(answer: RowOutput) -> None:
    for part in answer.parts:
        sys.stdout.write("".join([f"{escape_keeping_nul(answer.line(row))}\n" for row in part]))
        sys.stdout.flush()


def _objects(answer: RowOutput) -> None:
    for part in answer.parts:
        sys.stdout.write("".join([f"{escape_json(compact(row))}\n" for row in part]))
        sys.stdout.flush()


def _array(answer: RowOutput) -> None:
    empty = True
    for part in answer.parts:
        for row in part:
            sys.stdout.write(("[\n" if empty else ",\n") + escape_json(compact(row)))
            empty = False
    sys.stdout.write("[]\n" if empty else "\n]\n")


def _csv(answer: RowOutput, text: Callable[[str], str] = escape_csv_cell) -> None:
    import csv

    def cell(held: Any) -> Any:
        held = compact(held) if isinstance(held, list | dict) else held
        return text(held) if isinstance(held, str) else held

    writer = None
    for part in answer.parts:
        for row in part:
            if writer is None:
                writer = csv.DictWriter(sys.stdout, list(row), lineterminator="\n")
                writer.writerow({name: text(name) for name in row})
            writer.writerow({name: cell(held) for name, held in row.items()})
        sys.stdout.flush()


def _arrow(answer: RowOutput) -> None:
    import pyarrow as pa

    def tables() -> Iterable[Any]:
        schema = answer.schema
        for part in answer.parts:
            if part:
                made = pa.Table.from_pylist(list(part), schema=schema)
                schema = made.schema
                yield made

    _write(arrow_stream(tables()))


def arrow_stream(tables: Iterable[Any]) -> Iterable[bytes]:
    """Tables of one schema as an Arrow IPC stream."""
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
    "csv-raw": lambda answer: _csv(answer, str),
    "arrow": _arrow,
}


def _print(text: Any) -> None:
    # What is piped is for tools: no wrapping at a width that nobody sees.
    shown = console(soft_wrap=True) if sys.stdout.isatty() else console(width=1000, soft_wrap=True)
    shown.print(text, highlight=False, markup=False)


def _write(parts: Iterable[bytes]) -> None:
    for part in parts:
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()


def utc(milliseconds: int) -> str:
    """A Unix time in milliseconds as people read it, in UTC."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def compact(value: Any) -> str:
    """`value`, JSON-ready, as JSON on one line; null for numbers that JSON has none for."""
    return orjson.dumps(value).decode()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | dict):
        return escape_json(compact(value))
    return "yes" if value is True else "no" if value is False else escape_control_characters(str(value))
