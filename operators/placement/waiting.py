"""Work that was never dispatched, and the prompt records that a restart needs for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from operators.io.elements import PartitionKey, ReceivedRecord
from operators.io.pending import PendingOffsets
from operators.placement.work import Work
from schemas.identity import Purpose


class _Entry(NamedTuple):
    work: Work
    place: PartitionKey
    offset: int


class WaitingWork:
    """The samples of prompts in the order of their coming, by purpose; `pending` holds their prompts' offsets.

    A restart reads a prompt again while any of its samples waits, so what is `known` to be dispatched is passed over.
    """

    def __init__(self, pending: PendingOffsets, known: Callable[[Work], bool]) -> None:
        self._pending, self._known = pending, known
        self._queues: dict[Purpose, deque[_Entry]] = {"train": deque(), "evaluation": deque()}

    def add(self, received: ReceivedRecord) -> None:
        """Take in the prompt that was `received`."""
        prompt, place = received.record, PartitionKey(received.topic, received.partition)
        self._pending.add(place, received.offset, prompt.samples)
        works = (Work(prompt, member) for member in range(prompt.samples))
        self._queues[prompt.purpose].extend(_Entry(work, place, received.offset) for work in works)

    def head(self, purpose: Purpose) -> Work | None:
        """The next work that has to be dispatched; ask once all that was written before this start is known."""
        queue = self._queues[purpose]
        while queue and self._known(queue[0].work):
            self._drop(queue)
        return queue[0].work if queue else None

    def pop(self, purpose: Purpose) -> Work:
        """Take the head."""
        return self._drop(self._queues[purpose]).work

    def _drop(self, queue: deque[_Entry]) -> _Entry:
        entry = queue.popleft()
        self._pending.remove(entry.place, entry.offset)
        return entry
