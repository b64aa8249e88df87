"""Groups in the order of their prompt numbers: the buffer waits for long answers, so that staleness is bounded.

Proof. Placement dispatches prompts in the order of their dense numbers, under the newest version only. When it starts
a group, at most B (S + 1) - 1 trajectories are dispatched and not trained (B is `global_batch`, S `max_staleness`). If
batches take groups in the same order, the batches between the newest version at a group's dispatch and the batch that
trains the group consist of those trajectories only, at least B in each. So there are at most S such batches, and their
number is the group's staleness.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from operators.experience.groups import Group
from operators.experience.settlements import SettlementLedger


class PromptOrder:
    """Yields ready groups in the order of their numbers, up to the first number that is neither ready nor closed."""

    def __init__(self, settlements: SettlementLedger) -> None:
        self._settlements = settlements
        self._due = 0
        """All groups before this number are closed."""

    def order(self, ready: Iterable[Group]) -> Iterator[Group]:
        """The groups of `ready` that are due, in the order of their numbers."""
        due = self._due = self._first_not_closed(self._due)
        for group in sorted(ready, key=lambda group: group.number):
            due = self._first_not_closed(due) if group.number > due else due
            if group.number != due:
                return
            yield group
            due += 1

    def _first_not_closed(self, number: int) -> int:
        while self._settlements.is_closed(number):
            number += 1
        return number
