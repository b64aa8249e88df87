"""Whether a session got further than the one before it: else a transaction that always fails would repeat for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infra.kafka.session import Outgoing


class CommitProgress:
    """The transactions of one session, by size and topics.

    A session that was lost in a transaction may have committed smaller ones before, without the outputs that fail.
    """

    def __init__(self) -> None:
        self._largest, self._topics = 0, set[str]()
        self._begun: tuple[int, set[str]] | None = None
        self._commits = 0

    def begin(self, outputs: Sequence[Outgoing]) -> None:
        """A transaction with `outputs` begins."""
        self._begun = sum(len(each.value) for each in outputs), {each.topic for each in outputs}

    def commit(self) -> None:
        """The transaction that began last is committed."""
        size, topics = self._begun or (0, set())
        self._largest, self._begun, self._commits = max(self._largest, size), None, self._commits + 1
        self._topics |= topics

    @property
    def failed_bytes(self) -> int:
        """Size of the outputs of the transaction in which the session was lost; 0 if there is none."""
        return self._begun[0] if self._begun else 0

    @property
    def made(self) -> bool:
        """Whether the session committed more than its start, and what it was lost in is neither larger than what it
        committed nor of a topic in which it committed nothing.
        """
        size, topics = self._begun or (0, set())
        return self._commits > 1 and size <= self._largest and topics <= self._topics
