"""Questions in a JSONL file of any size; memory use is one offset per line."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from operators.prompts.config import TaskConfig
from operators.prompts.layouts import ConditionColumns, question_of
from operators.prompts.question import BadRow, Question, SourceError, UnusableRow

MAX_LINE_BYTES = 8 * 1024 * 1024
"""The maximum size of a record on a topic, so no usable line is longer."""


class JsonlRows:
    """The lines of a JSONL file without blank ones; row numbers count all lines from 0.

    Raises SourceError if the file does not exist. The file must not change while it is read.
    """

    def __init__(self, path: Path, config: TaskConfig) -> None:
        if not path.is_file():
            raise SourceError(f"no file {path}" + (" (it is a folder)" if path.is_dir() else ""))
        self.name = str(path)
        self._task = config.row_task
        self._config = config
        self._offsets = array("q")
        self._file = path.open("rb")

    def scan(self) -> Iterator[Question | BadRow]:
        """Yield every line in order and index the file. Only the start of a line that is too long is kept.

        Raises SourceError at the end if no line has a column of `where` or `levels`.
        """
        columns = ConditionColumns(self._config)
        del self._offsets[:]
        self._file.seek(0)
        offset = 0
        while line := self._file.readline(MAX_LINE_BYTES + 1):
            row = len(self._offsets)
            self._offsets.append(offset)
            offset += len(line) if len(line) <= MAX_LINE_BYTES else self._skip_line(line)
            if line.strip():
                try:
                    value = self._decode(line)
                    columns.record(value)
                    found: Question | BadRow = question_of(value, row, self._config, self._task)
                except UnusableRow as error:
                    found = error.at(row + 1)
                # The caller may read another row in between, so the position is restored.
                yield found
                self._file.seek(offset)
        columns.check(self.name)

    def question(self, row: int) -> Question:
        """The question in line `row`. Raises UnusableRow if the file has changed since it was scanned."""
        self._file.seek(self._offsets[row])
        value = self._decode(self._file.readline(MAX_LINE_BYTES + 1))
        return question_of(value, row, self._config, self._task)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _skip_line(self, part: bytes) -> int:
        length = len(part)
        while part and not part.endswith(b"\n"):
            part = self._file.readline(MAX_LINE_BYTES)
            length += len(part)
        return length

    def _decode(self, line: bytes) -> Any:
        if len(line) > MAX_LINE_BYTES:
            raise UnusableRow(f"the line is longer than {MAX_LINE_BYTES} bytes")
        try:
            return json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            what = "a CSV file: convert it to JSON Lines or Parquet" if self.name.endswith(".csv") else str(error)
            raise UnusableRow(f"not JSON ({what})") from error


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
