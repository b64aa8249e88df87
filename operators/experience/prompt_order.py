"""Groups in the order of their prompts: how the buffer waits for long answers, so that none becomes too old.

Placement dispatches prompts in the order of their dense numbers, under the newest version alone, and bounds what is
dispatched and not trained to B (S + 1) - 1 trajectories before a group begins (B a batch, S `max_staleness`). Where
batches take groups in that order, too, the batches between the newest version at a group's dispatch and the batch that
trains it are made of those trajectories alone, at least B each. So there are S of them at most: that is its staleness.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from operators.experience.endings import Endings
from operators.experience.groups import Group


class PromptOrder:
    """Yields ready groups whose turn it is: every group before them has ended, or goes before them."""

    def __init__(self, endings: Endings) -> None:
        self._endings = endings
        self._due = 0
        """No group before this number is to come."""

    def order(self, ready: Iterable[Group]) -> Iterator[Group]:
        """Those of `ready` whose turn it is, in the order of their numbers."""
        due = self._due = self._after_ended(self._due)
        for group in sorted(ready, key=lambda group: group.number):
            due = self._after_ended(due) if group.number > due else due
            if group.number != due:
                return
            yield group
            due += 1

    def _after_ended(self, number: int) -> int:
        while self._endings.is_over(number):
            number += 1
        return number
