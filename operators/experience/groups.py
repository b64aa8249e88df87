"""Groups on their way to completion: the memory of the experience buffer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from schemas.records import Experience, Prompt


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
        self._open.setdefault(held.experience.trajectory.prompt.prompt_id, []).append(held)
        self._size += 1

    def complete(self, prompt: Prompt, answered: int) -> None:
        """Close the group of `prompt` if what it holds and `answered` members that are settled already are all."""
        group = self._open.get(prompt.prompt_id, [])
        if group and len(group) + answered >= prompt.samples:
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

    def has(self, least: int) -> bool:
        """Whether complete groups hold `least` experiences or more."""
        return self._ready >= least

    def take(self, least: int) -> list[list[Held]] | None:
        """The oldest complete groups with `least` experiences or more together; None while there are too few."""
        if not self.has(least):
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

    def evict(self, unwanted: Callable[[Held], bool]) -> list[Held]:
        """Take what is `unwanted` out of the complete groups."""
        evicted = [held for group in self._complete for held in group if unwanted(held)]
        if evicted:
            gone = set(map(id, evicted))
            kept = ([held for held in group if id(held) not in gone] for group in self._complete)
            self._complete = deque(group for group in kept if group)
            self._ready -= len(evicted)
            self._size -= len(evicted)
        return evicted
