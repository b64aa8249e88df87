"""What commands return, and the one place that prints it: tables for people, JSON for tools."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """The whole answer of a command: `data` is what `--json` prints, `text` makes a string or table for people."""

    data: Any
    text: Callable[[], Any]
    as_json: bool = False
    exit_code: int = 0


@dataclass(frozen=True)
class Stream:
    """An answer that comes bit by bit: a JSON object a line for tools, else a line of `line` for people."""

    items: Iterable[Row]
    line: Callable[[Row], str]
    as_json: bool = False


@dataclass(frozen=True)
class Chunks:
    """An answer in a format of its own, as bytes for tools."""

    parts: Iterable[bytes]


def table(rows: Iterable[Row], columns: Sequence[str], title: str = "") -> Table:
    """A table of `rows`, with a column for each key of `columns`; numbers stand right."""
    listed = list(rows)
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in columns:
        numeric = any(isinstance(row[name], int | float) for row in listed)
        made.add_column(name.upper().replace("_", "-"), justify="right" if numeric else "left", overflow="fold")
    for row in listed:
        made.add_row(*[_cell(row[name]) for name in columns])
    return made


def show(result: Any) -> None:
    """Print what a command returned. Raises typer.Exit with its exit code where that is not 0."""
    if isinstance(result, Stream):
        for item in result.items:
            sys.stdout.write((_json(item) if result.as_json else result.line(item)) + "\n")
            sys.stdout.flush()
    elif isinstance(result, Report):
        if result.as_json:
            sys.stdout.write(_json(result.data, indent=1) + "\n")
        else:
            # What is piped is for tools: no wrapping at a width that nobody sees.
            console = Console(soft_wrap=True) if sys.stdout.isatty() else Console(width=1000, soft_wrap=True)
            console.print(result.text(), highlight=False, markup=False)
        if result.exit_code:
            raise typer.Exit(result.exit_code)
    elif isinstance(result, Chunks):
        for part in result.parts:
            sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
    elif result is not None:
        raise TypeError(f"a command returned {type(result).__name__}; it must return what `output` knows, or None")


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return "yes" if value is True else "no" if value is False else str(value)
