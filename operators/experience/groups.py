"""Groups on their way to completion: the memory of the experience buffer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from schemas.records import Experience


@dataclass(frozen=True, slots=True)
class Held:
    """An experience in the buffer and where it stands in its topic."""

    partition: int
    offset: int
    experience: Experience


class GroupBuffer:
    """Experiences by group; complete groups leave first in, first out, in the order of their completion."""

    def __init__(self) -> None:
        self._open: dict[str, list[Held]] = {}
        self._complete: deque[list[Held]] = deque()
        self._ready = 0
        self._size = 0

    def add(self, held: Held) -> None:
        """Put an experience to its group."""
        prompt = held.experience.trajectory.prompt
        group = self._open.setdefault(prompt.prompt_id, [])
        group.append(held)
        self._size += 1
        if len(group) >= prompt.samples:
            self._complete.append(self._open.pop(prompt.prompt_id))
            self._ready += len(group)

    @property
    def trajectories(self) -> int:
        """Experiences held, of complete and of open groups."""
        return self._size

    @property
    def groups(self) -> int:
        """Groups held, complete and open."""
        return len(self._open) + len(self._complete)

    def take(self, least: int) -> list[list[Held]] | None:
        """The oldest complete groups with `least` experiences or more together; None while there are too few."""
        if self._ready < least:
            return None
        taken: list[list[Held]] = []
        count = 0
        while count < least:
            group = self._complete.popleft()
            taken.append(group)
            count += len(group)
        self._ready -= count
        self._size -= count
        return taken
