"""Rounds: schedules with a global boundary begin the next batch once the last has been generated whole."""

from __future__ import annotations


class Rounds:
    """Counts what the present round may still begin; a round is of `size` trajectories."""

    def __init__(self, size: int, left: int = 0) -> None:
        self._size = size
        self.left = left

    def admits(self, under_way: int, room: int) -> bool:
        """Whether another group may begin with `under_way` trajectories not finished and `room` under the bound."""
        if under_way == 0:
            self.left = min(self._size, room)
        return self.left > 0

    def count(self) -> None:
        """A trajectory of the round begins."""
        self.left -= 1
