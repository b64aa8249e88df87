"""A shard of one input and one output on the tests' broker, and what opens sessions of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # kafka-python warns while it is imported, before pytest knows which warnings are allowed
    from infra.kafka.broker import Broker
    from infra.kafka.session import Session
    from infra.kafka.session_config import SessionConfig


@pytest.fixture(autouse=True)
def _patient_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session asks once whether Kafka responds, for 2 s: its owner opens another one, a test does not."""
    from infra.kafka import clients

    problem = clients.connection_problem
    monkeypatch.setattr(clients, "connection_problem", lambda arguments, timeout_s: problem(arguments, 10 * timeout_s))


@pytest.fixture
def config(broker: Broker, run_id: str) -> SessionConfig:
    """One input, one output that is the ledger, and a place for notes, each of one partition."""
    from shard_sessions import make_shard

    return make_shard(broker, run_id)


@pytest.fixture
def opened() -> Iterator[Callable[[SessionConfig], Session]]:
    """Opens sessions without closing the one before, as two processes would; closes them all when the test ends."""
    from infra.kafka.session import Session

    sessions: list[Session] = []

    def open_session(config: SessionConfig) -> Session:
        sessions.append(Session(config))
        return sessions[-1]

    yield open_session
    for session in sessions:
        session.close()
