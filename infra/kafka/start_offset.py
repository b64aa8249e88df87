"""Where to begin reading, the same way in each partition. What people write is read by `offset_span`."""

from __future__ import annotations

from dataclasses import dataclass


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
