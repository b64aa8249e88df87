"""Work that has not been dispatched, and the prompt records that a restart needs for it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from operators.io.elements import PartitionKey, ReceivedRecord
from operators.io.pending import PendingOffsets
from operators.placement.work_table import Work
from schemas.identity import Purpose
from schemas.records import PolicyVersion


class _Entry(NamedTuple):
    work: Work
    key: PartitionKey
    offset: int


class WaitingWork:
    """Queues of the samples of prompts, by purpose, in log order; `pending` holds the offsets of their prompts.

    A restart reads a prompt again while any of its samples waits, so samples that are `known` to be dispatched are
    skipped.
    """

    def __init__(self, pending: PendingOffsets, known: Callable[[Work], bool]) -> None:
        self._pending, self._known = pending, known
        self._queues: dict[Purpose, deque[_Entry]] = {"train": deque(), "evaluation": deque()}
        self._versions: Counter[PolicyVersion] = Counter()
        """By version that waiting prompts name: how many samples name it."""

    def add(self, received: ReceivedRecord) -> None:
        """Queue the samples of the received prompt."""
        prompt, key = received.record, PartitionKey(received.topic, received.partition)
        self._pending.add(key, received.offset, prompt.samples)
        works = (Work(prompt, member) for member in range(prompt.samples))
        self._queues[prompt.purpose].extend(_Entry(work, key, received.offset) for work in works)
        if prompt.policy_version is not None:
            self._versions[prompt.policy_version] += prompt.samples

    def versions(self) -> list[PolicyVersion]:
        """The versions that waiting prompts name, first come first."""
        return list(self._versions)

    def head(self, purpose: Purpose) -> Work | None:
        """The next work to dispatch; call it once all records written before this start are folded."""
        queue = self._queues[purpose]
        while queue and self._known(queue[0].work):
            self._drop(queue)
        return queue[0].work if queue else None

    def count(self, purpose: Purpose) -> int:
        """How many samples wait; a restart counts those that were dispatched before it, too."""
        return len(self._queues[purpose])

    def rest_of_begun(self) -> int:
        """How many samples wait of the training prompt whose dispatch has begun."""
        work = self.head("train")
        return work.prompt.samples - work.member if work is not None and work.member else 0

    def pop(self, purpose: Purpose) -> Work:
        """Remove and return the head."""
        return self._drop(self._queues[purpose]).work

    def _drop(self, queue: deque[_Entry]) -> _Entry:
        entry = queue.popleft()
        self._pending.remove(entry.key, entry.offset)
        if (version := entry.work.prompt.policy_version) is not None:
            self._versions[version] -= 1
            if not self._versions[version]:
                del self._versions[version]
        return entry
