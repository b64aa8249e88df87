"""A start offset that applies to every partition. `offset_span` parses the notation of the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StartOffset:
    """An absolute offset, or with `from_end` the number of offsets before the end of a partition."""

    count: int
    from_end: bool = False

    def within(self, beginning: int, end: int) -> int:
        """The absolute offset in a partition with offsets from `beginning` to before `end`."""
        wanted = end - self.count if self.from_end else self.count
        return max(beginning, min(wanted, end))


BEGINNING = StartOffset(0)
