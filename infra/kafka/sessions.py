"""The open sessions of one process: the source of a shard opens one, and its sink uses it."""

from __future__ import annotations

from collections.abc import Callable

from infra.kafka.clients import SessionClients
from infra.kafka.session import Session
from infra.kafka.session_config import SessionConfig


class Sessions:
    """The sessions of one process, by group. The source opens one, the sink of the same shard uses it.

    `clients` makes what a session connects with; by default it connects to Kafka.
    """

    def __init__(self, clients: Callable[[SessionConfig], SessionClients] | None = None) -> None:
        self._open: dict[str, Session] = {}
        self._clients = clients

    def open(self, config: SessionConfig) -> Session:
        """Open a session for `config.group`, after closing the last one. Raises SessionLost if Kafka is unavailable."""
        self.close(config.group, patience_s=config.transaction_timeout_s)
        session = self._open[config.group] = Session(config, None if self._clients is None else self._clients(config))
        return session

    def get(self, group: str) -> Session | None:
        """The session of `group` in this process; None before the first."""
        return self._open.get(group)

    def close(self, group: str, patience_s: float = 1.0) -> None:
        """Close the session of `group`, if there is one."""
        session = self._open.pop(group, None)
        if session is not None:
            session.close(patience_s)


SESSIONS = Sessions()
"""The sessions of this process."""
