"""Rounds: under a schedule with a global boundary, a round begins once the previous one is generated completely."""

from __future__ import annotations


class Rounds:
    """Counts the trajectories that the present round may still begin (`left`), of `size` in a round."""

    def __init__(self, size: int, left: int = 0) -> None:
        self._size = size
        self.left = left

    def admits(self, unfinished: int, room: int) -> bool:
        """Whether another group may begin, with `unfinished` trajectories and `room` below the bound."""
        if unfinished == 0:
            self.left = min(self._size, room)
        return self.left > 0

    def count(self) -> None:
        """Count a trajectory that begins."""
        self.left -= 1
