"""Leases. Only placement mints them, so a lease above the last one is invalid."""

from __future__ import annotations


class Leases:
    """Rising numbers; `last` is the latest one minted."""

    def __init__(self, last: int) -> None:
        self.last = last

    def mint(self) -> int:
        """The next lease."""
        self.last += 1
        return self.last
