"""Leases: who minted which. Only placement does, so the last one says which there can be."""

from __future__ import annotations


class Leases:
    """Rising numbers; `last` is the latest that was given."""

    def __init__(self, last: int) -> None:
        self.last = last

    def mint(self) -> int:
        """The next lease."""
        self.last += 1
        return self.last
