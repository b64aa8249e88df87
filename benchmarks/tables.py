"""Prints the rows of a benchmark that are alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def print_rows(rows: Sequence[Mapping[str, Any]], title: str, as_json: bool, digits: int = 3, width: int = 120) -> None:
    """Print `rows`, which all have the same names, as JSON or as a table of their numbers with so many digits."""
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(title=title)
    for name, value in rows[0].items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else _text(value, digits) for value in row.values()))
    Console(width=width).print(table)


def _text(value: float, digits: int) -> str:
    return f"{value:,.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"
