"""Does a broker answer? The question that starting and waiting both ask."""

from __future__ import annotations

import socket
from typing import Any

from kafka import KafkaAdminClient
from kafka.errors import KafkaError


def answers(bootstrap_servers: str, timeout_s: float = 5.0, **security: Any) -> bool:
    """Tell whether one of `host:port[,host:port]` speaks Kafka and knows at least one live broker.

    `security` are further kafka-python settings for an admin client. Never raises for a broker that is not there.
    """
    if not any(_connects(address) for address in bootstrap_servers.split(",")):
        return False  # cheaper and quicker than a client that backs off and logs
    try:
        with KafkaAdminClient(
            bootstrap_servers=bootstrap_servers.split(","),
            bootstrap_timeout_ms=int(timeout_s * 1000),
            request_timeout_ms=int(timeout_s * 1000),
            **security,
        ) as client:
            return bool(client.describe_cluster()["brokers"])
    except KafkaError:
        return False


def _connects(address: str) -> bool:
    host, _, port = address.strip().rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2.0):
            return True
    except OSError:
        return False
