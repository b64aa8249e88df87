"""Long lines for people: wrapped between words on a terminal, and whole in a pipe or a file."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from typing import TextIO

from infra.escaping import print_escaped

MIN_COLUMNS = 20
"""A narrower terminal wraps by itself."""
_NO_BREAK = "\0"


def wrapped(text: str, columns: int | None) -> str:
    """`text` with each line that is longer than `columns` continued on lines that are indented by two more.

    A word is not divided, nor a command in backticks: it can be copied. None: `text` as it is.
    """
    if columns is None or columns < MIN_COLUMNS:
        return text
    return "\n".join(_wrapped_line(line, columns) for line in text.split("\n"))


def columns_of(stream: TextIO) -> int | None:
    """The width of the terminal that `stream` writes to; None if it is none."""
    return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else None


def print_wrapped(text: str, *, err: bool = False) -> None:
    """Print `text` as `print_escaped`, wrapped for a terminal."""
    print_escaped(wrapped(text, columns_of(sys.stderr if err else sys.stdout)), err=err)


def _wrapped_line(line: str, columns: int) -> str:
    if len(line) <= columns:
        return line
    start = line[: len(line) - len(line.lstrip(" "))]
    whole = re.sub("`[^`]*`", lambda command: command[0].replace(" ", _NO_BREAK), line[len(start) :])
    filled = textwrap.fill(
        whole,
        columns,
        initial_indent=start,
        subsequent_indent=f"{start}  ",
        break_long_words=False,
        break_on_hyphens=False,
        expand_tabs=False,
        replace_whitespace=False,
    )
    return filled.replace(_NO_BREAK, " ")
