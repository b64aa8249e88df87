"""Records the lines of a folder's modules that processes execute: those of this process and of all that it starts.

A copy named `sitecustomize.py` in PYTHONPATH traces each interpreter that has FOLDER and FILE in its environment.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER, FILE = "TRACED_FOLDER", "TRACED_LINES"
"""Variables: the modules' folder, and the file to which each line is appended, `MODULE LINE`."""
AFTER = "TRACED_AFTER"
"""Variable: modules that an interpreter imports before it is traced, which would take many times as long then."""


def start_tracing() -> None:
    """Append lines as they are first executed, so that killed processes and forks have recorded theirs."""
    prefix, seen = f"{os.environ[FOLDER]}/", set[tuple[str, int]]()
    file = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def trace_lines(frame: FrameType, event: str, argument: object) -> Any:
        line = (frame.f_code.co_filename, frame.f_lineno)
        if line not in seen:
            with suppress(OSError):  # a test may limit the size of files
                os.write(file, f"{Path(line[0]).stem} {line[1]}\n".encode())
                seen.add(line)
        return trace_lines

    def trace_calls(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(prefix):
            return None
        return trace_lines(frame, event, argument)

    threading.settrace(trace_calls)
    sys.settrace(trace_calls)


if __name__ == "sitecustomize" and FILE in os.environ:
    for imported in os.environ.get(AFTER, "").split():
        importlib.import_module(imported)
    start_tracing()
