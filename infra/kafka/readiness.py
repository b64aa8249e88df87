"""Checks whether Kafka responds, and waits until it does."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from kafka import KafkaAdminClient
from kafka.errors import KafkaError, RetriableError

from infra.kafka.properties import ClientProperties

T = TypeVar("T")
TransientError = RetriableError
"""Raised by a request while a connection breaks or a leader moves: a retry may succeed."""
ClientError = KafkaError
"""Any error of the Kafka client, also a lasting one, such as a missing permission."""
RETRY_S = 60.0
"""How long a request is retried at a start."""
WAIT_LINE_S = 10.0
"""How often a wait for brokers is reported."""


class BrokerUnreachable(RuntimeError):
    """No broker responded within the time-out."""


def connection_problem(arguments: dict[str, Any], timeout_s: float = 5.0, *, advertised: bool = False) -> str | None:
    """Return None if one of the brokers responds and knows a live broker, else the problem as text.

    With `advertised`, every live broker must be reachable at the address that it advertises, to which clients connect.
    `arguments` are those of a KafkaAdminClient, `bootstrap_servers` a list of `host:port`. Takes at most about
    `timeout_s` seconds per address. Never raises for a broker that is not reachable or rejects the login.
    """
    # A plain socket first: it fails at once, where the client would retry and log until its time-out.
    reasons = {address: _connection_error(address, timeout_s) for address in arguments["bootstrap_servers"]}
    listening = [address for address, reason in reasons.items() if reason is None]
    if not listening:
        return "; ".join(reason for reason in reasons.values() if reason)
    timeouts = {"bootstrap_timeout_ms": int(timeout_s * 1000), "request_timeout_ms": int(timeout_s * 1000)}
    try:
        with KafkaAdminClient(**(arguments | timeouts | {"bootstrap_servers": listening})) as client:
            alive = [broker for broker in client.describe_cluster()["brokers"] if not broker.get("is_fenced")]
    except KafkaError as error:  # the client does not report a rejected login
        return f"{error}; are login and certificates correct?" if "security_protocol" in arguments else str(error)
    if not alive:
        return "the cluster has no live broker yet"
    return _advertised_problem(alive, listening, timeout_s) if advertised else None


def retry_transient(
    request: Callable[[], T],
    errors: type[KafkaError] | tuple[type[KafkaError], ...] = RetriableError,
    within_s: float = RETRY_S,
) -> T:
    """Return the result of `request`, retried for `within_s` seconds while a connection breaks or Kafka moves leaders.

    `request` must be idempotent. Raises its error if it is not of `errors`, or after `within_s`.
    """
    started, pause = time.monotonic(), 0.1
    while True:
        try:
            return request()
        except errors:
            if time.monotonic() - started >= within_s:
                raise
        time.sleep(pause)
        pause = min(2.0, pause * 1.6)


def wait_for_brokers(
    properties: ClientProperties,
    deadline_s: float,
    on_wait: Callable[[float, str], None] = lambda elapsed_s, message: None,
    *,
    setting: str = "bootstrap.servers",
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return as soon as Kafka responds and every broker is reachable from here.

    Retries at growing intervals (0.1 s to 2 s) for `deadline_s` seconds.

    At the first pause, and then every WAIT_LINE_S seconds, `on_wait` gets the seconds waited so far and a line with the
    address and the reason. Raises BrokerUnreachable with the addresses, their `setting`, the seconds and the last
    reason; ValueError for an invalid property.
    """
    arguments = properties.admin()
    addresses = ",".join(arguments["bootstrap_servers"])
    started, pause, next_line = clock(), 0.1, 0.0
    timeout_s = max(0.5, min(5.0, deadline_s))
    while (reason := connection_problem(arguments, timeout_s, advertised=True)) is not None:
        elapsed = clock() - started
        if elapsed >= deadline_s:
            raise BrokerUnreachable(
                f"no Kafka broker responded at {addresses} in {elapsed:.1f} s: {reason}. "
                f"Is it running, and is {setting} correct?"
            )
        if elapsed >= next_line:
            next_line = elapsed + WAIT_LINE_S
            on_wait(elapsed, f"waiting for Kafka at {addresses} ({elapsed:.1f} of {deadline_s:g} s): {reason}")
        sleep(min(pause, deadline_s - elapsed))
        pause = min(2.0, pause * 1.6)


def _advertised_problem(brokers: Sequence[Mapping[str, Any]], reached: Collection[str], timeout_s: float) -> str | None:
    for broker in brokers:
        address = f"{broker['host']}:{broker['port']}"
        if address not in reached and (reason := _connection_error(address, timeout_s)) is not None:
            return (
                f"broker {broker['broker_id']} advertises {address}, which does not respond to this machine "
                f"({reason}): set its advertised.listeners to an address that every machine of the run reaches"
            )
    return None


def _connection_error(address: str, timeout_s: float) -> str | None:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return None
    except OSError as error:
        return f"{address}: {error.strerror or error}"
