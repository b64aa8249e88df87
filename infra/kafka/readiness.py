"""Does Kafka answer? The question that starting a broker and waiting for one both ask."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kafka import KafkaAdminClient
from kafka.errors import KafkaError, RetriableError

from infra.kafka.properties import ClientProperties

T = TypeVar("T")
TransientError = RetriableError
"""What a question to Kafka raises while a connection breaks or a leader moves: asked again, it may be answered."""
RETRY_S = 60.0
"""How long a question at a start is asked again."""


class BrokerUnreachable(RuntimeError):
    """No broker answered within the time given."""


def connection_problem(arguments: dict[str, Any], timeout_s: float = 5.0) -> str | None:
    """Return None when one of the brokers speaks Kafka and knows a live broker, else what is wrong, in words.

    `arguments` are a KafkaAdminClient's, `bootstrap_servers` a list of `host:port`. Takes at most about `timeout_s`
    seconds an address and never raises for a broker that is not there or refuses the login.
    """
    # A socket first: it says at once what the client would retry and log about until its time-out.
    reasons = {address: _connection_error(address, timeout_s) for address in arguments["bootstrap_servers"]}
    listening = [address for address, reason in reasons.items() if reason is None]
    if not listening:
        return "; ".join(reason for reason in reasons.values() if reason)
    timeouts = {"bootstrap_timeout_ms": int(timeout_s * 1000), "request_timeout_ms": int(timeout_s * 1000)}
    try:
        with KafkaAdminClient(**(arguments | timeouts | {"bootstrap_servers": listening})) as client:
            alive = [broker for broker in client.describe_cluster()["brokers"] if not broker.get("is_fenced")]
            return None if alive else "the cluster has no live broker yet"
    except KafkaError as error:  # the client does not say that it was refused
        return f"{error}; are login and certificates right?" if "security_protocol" in arguments else str(error)


def retry_transient(
    ask: Callable[[], T],
    for_s: float = RETRY_S,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Return what `ask` returns, which is asked again for `for_s` seconds while a connection breaks or Kafka moves
    leaders: what `ask` does must be repeatable. Raises what it raises otherwise, or at last.
    """
    started, pause = clock(), 0.1
    while True:
        try:
            return ask()
        except RetriableError:
            if clock() - started >= for_s:
                raise
        sleep(pause)
        pause = min(2.0, pause * 1.6)


def wait_for_brokers(
    properties: ClientProperties,
    deadline_s: float,
    on_wait: Callable[[float, str], None] = lambda elapsed_s, message: None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return as soon as Kafka answers, trying again at growing intervals (0.1 s to 2 s) for `deadline_s` seconds.

    `on_wait` gets, before each pause, the seconds waited so far and a line that says where and why. Raises
    BrokerUnreachable, naming the addresses, the seconds and the last reason; ValueError on a bad property.
    """
    arguments = properties.admin()
    addresses = ",".join(arguments["bootstrap_servers"])
    started, pause = clock(), 0.1
    while (reason := connection_problem(arguments, timeout_s=max(0.5, min(5.0, deadline_s)))) is not None:
        elapsed = clock() - started
        if elapsed >= deadline_s:
            raise BrokerUnreachable(
                f"no Kafka broker answered at {addresses} in {elapsed:.1f} s: {reason}. "
                "Is it running, and is bootstrap.servers right?"
            )
        on_wait(elapsed, f"waiting for Kafka at {addresses} ({elapsed:.1f} of {deadline_s:g} s): {reason}")
        sleep(min(pause, deadline_s - elapsed))
        pause = min(2.0, pause * 1.6)


def _connection_error(address: str, timeout_s: float) -> str | None:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return None
    except OSError as error:
        return f"{address}: {error.strerror or error}"
