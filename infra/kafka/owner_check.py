"""Tells an idle session of its successor: one that commits learns of it from Kafka, which fences its producer."""

from __future__ import annotations

import contextlib

from kafka import TopicPartition
from kafka.errors import KafkaError

from infra.kafka.clients import SessionClients
from infra.kafka.note import last_note
from infra.kafka.session_config import SessionConfig

OWNER_S = 60.0
"""Seconds without a commit after which a session looks who owns its shard."""


class OwnerCheck:
    """Looks for later starts of the shard of `config`."""

    def __init__(self, config: SessionConfig, clients: SessionClients) -> None:
        self._config, self._clients = config, clients
        self._commits, self._since = -1, 0.0

    def successor(self, start: int, commits: int, note_at: int | None) -> int | None:
        """The number of a later start than `start`, if this has made no more than `commits` for OWNER_S; None else, or
        if Kafka does not answer: it is asked again later. The last note is at offset `note_at`."""
        now = self._clients.monotonic()
        if commits != self._commits:
            self._commits, self._since = commits, now
        if now - self._since < OWNER_S:
            return None
        self._since = now
        with contextlib.suppress(KafkaError):
            observer = self._clients.observer()
            try:
                note = last_note(observer, TopicPartition(*self._config.restore), self._config.group, note_at)
            finally:
                observer.close(autocommit=False)
            if note is not None and note.start > start:
                return note.start
        return None
