"""Questions in a JSONL file of any size: memory holds one offset a line."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from operators.prompts.config import TaskConfig
from operators.prompts.layouts import question_of
from operators.prompts.question import BadRow, Question, SourceError, UnusableRow

MAX_LINE_BYTES = 8 * 1024 * 1024
"""No record on a topic may be larger, so no line needs to be."""


class JsonlRows:
    """The lines of a JSONL file, blank ones left out; row numbers count lines from 0.

    Raises SourceError if there is no such file. The file must not change while it is read.
    """

    def __init__(self, path: Path, config: TaskConfig) -> None:
        if not path.is_file():
            raise SourceError(f"no file {path}" + (" (it is a folder)" if path.is_dir() else ""))
        self.name = str(path)
        self._task = config.task or path.stem
        self._config = config
        self._offsets = array("q")
        self._file = path.open("rb")

    def scan(self) -> Iterator[Question | BadRow]:
        """Every line in order; indexes the file. Of one that is too long only the start is held."""
        del self._offsets[:]
        self._file.seek(0)
        offset = 0
        while line := self._file.readline(MAX_LINE_BYTES + 1):
            row = len(self._offsets)
            self._offsets.append(offset)
            offset += len(line) if len(line) <= MAX_LINE_BYTES else self._skip_line(line)
            if line.strip():
                try:
                    found: Question | BadRow = self._parse(line, row)
                except UnusableRow as error:
                    found = BadRow(row + 1, str(error))
                # The caller may have moved the file by reading another row.
                yield found
                self._file.seek(offset)

    def question(self, row: int) -> Question:
        """The question in line `row`. Raises UnusableRow if the file has changed since it was scanned."""
        self._file.seek(self._offsets[row])
        return self._parse(self._file.readline(MAX_LINE_BYTES + 1), row)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _skip_line(self, part: bytes) -> int:
        length = len(part)
        while part and not part.endswith(b"\n"):
            part = self._file.readline(MAX_LINE_BYTES)
            length += len(part)
        return length

    def _parse(self, line: bytes, row: int) -> Question:
        if len(line) > MAX_LINE_BYTES:
            raise UnusableRow(f"the line is longer than {MAX_LINE_BYTES} bytes")
        try:
            value = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise UnusableRow(f"not JSON ({error})") from error
        return question_of(value, row, self._config, self._task)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
