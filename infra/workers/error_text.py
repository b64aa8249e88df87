"""The text of an error that user code raised: one line, and the traceback of the first error of each place."""

from __future__ import annotations

import traceback
from types import TracebackType

from infra.workers.limits import OWN_FOLDERS, describe_error

MAX_PLACES = 16
"""Places whose first error has a traceback, so that a record's error stays small when every call fails."""
MAX_FRAMES = 5
MAX_TRACE_CHARACTERS = 1500


class ErrorText:
    """Describes errors for records and logs. The first error of each class and place has its traceback."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def describe(self, error: BaseException) -> str:
        """Return `describe_error(error)`; for the first error of its place, the innermost frames in further lines."""
        line = describe_error(error)
        place = f"{type(error).__name__} {place_of(line)}"
        if place in self._seen or len(self._seen) >= MAX_PLACES:
            return line
        self._seen.add(place)
        return "\n".join([line, *_frames(error.__traceback__)])


def first_line(text: str) -> str:
    """Return the error without its traceback."""
    return text.partition("\n")[0]


def place_of(line: str) -> str:
    """The file and line in `line`, the first one of an error."""
    return line.rpartition(" (")[2]


def _frames(trace: TracebackType | None) -> list[str]:
    """The innermost frames outside Laminar, as lines of a traceback."""
    frames = traceback.extract_tb(trace, limit=-64)
    outside = [frame for frame in frames if not frame.filename.startswith(OWN_FOLDERS)]
    text = "".join(traceback.format_list(outside[-MAX_FRAMES:]))
    text = text.encode("ascii", "backslashreplace").decode()
    return text[-MAX_TRACE_CHARACTERS:].rstrip().splitlines()
