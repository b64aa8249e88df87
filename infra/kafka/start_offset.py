"""Where to begin reading, in the grammar that kcat and rpk users know."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER = re.compile(r"-?\d{1,18}")


@dataclass(frozen=True, slots=True)
class StartOffset:
    """An offset from the beginning of a partition (`from_end` False: absolute), or so many before its end."""

    count: int
    from_end: bool = False

    def within(self, beginning: int, end: int) -> int:
        """The absolute offset in a partition that holds `beginning` up to, but not including, `end`."""
        wanted = end - self.count if self.from_end else self.count
        return max(beginning, min(wanted, end))


BEGINNING = StartOffset(0)
END = StartOffset(0, from_end=True)


def parse_start(text: str) -> StartOffset:
    """`beginning` (or `start`), `end`, an offset N, or -N for the last N of each partition. Raises ValueError."""
    if text in ("beginning", "start", "earliest"):
        return BEGINNING
    if text in ("end", "latest"):
        return END
    if _NUMBER.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no offset: give beginning, end, a number N, or -N for the last N")
    return StartOffset(abs(int(text)), from_end=text.startswith("-"))
