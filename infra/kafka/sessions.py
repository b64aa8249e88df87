"""The open sessions of one process: the source of a shard opens one, and its sink uses it."""

from __future__ import annotations

from collections.abc import Callable

from kafka.errors import KafkaError

from infra.kafka.clients import SessionClients
from infra.kafka.readiness import connection_problem
from infra.kafka.run_release import use_release
from infra.kafka.session import Session, SessionLost
from infra.kafka.session_config import SessionConfig
from schemas.topics import run_of

ANSWER_S = 2.0
"""Time limit of a broker's response before the run's release is read."""


class Sessions:
    """The sessions of one process, by group. The source opens one, the sink of the same shard uses it.

    `clients` makes what a session connects with; by default it connects to Kafka.
    """

    def __init__(self, clients: Callable[[SessionConfig], SessionClients] | None = None) -> None:
        self._open: dict[str, Session] = {}
        self._clients = clients
        self._releases: set[str] = set()
        """The runs whose release this process has read."""

    def open(self, config: SessionConfig) -> Session:
        """Open a session for `config.group`, after closing the last one.

        Raises as `Session`, and NewerRelease for a run whose records this release cannot read.
        """
        self.close(config.group, patience_s=config.transaction_timeout_s)
        self._use_release(config)
        session = self._open[config.group] = Session(config, None if self._clients is None else self._clients(config))
        return session

    def _use_release(self, config: SessionConfig) -> None:
        """Write records of the run's release from now on. The first session in this process decides."""
        run = run_of(config.restore.topic)
        if self._clients is not None or run is None or run in self._releases:
            return
        if (reason := connection_problem(config.client.admin(), ANSWER_S)) is not None:
            raise SessionLost(f"{config.group}: {reason}")
        try:
            use_release(config.client, run)
        except KafkaError as error:
            raise SessionLost(f"{config.group}: the run's release cannot be read: {error!r}") from error
        self._releases.add(run)

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
