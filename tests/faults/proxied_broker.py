"""A broker with two listeners: one for direct clients, one for clients through a proxy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from faults.kafka_proxy import KafkaProxy

from infra.kafka.broker import HOST, Broker, BrokerConfig, free_port, start_broker
from infra.kafka.properties import ClientProperties


@dataclass(frozen=True)
class ProxiedBroker:
    """A running broker and the proxy of its second listener."""

    broker: Broker
    proxy: KafkaProxy

    @property
    def direct(self) -> ClientProperties:
        """Properties of clients that connect directly, without faults."""
        return ClientProperties.at(self.broker.bootstrap_servers)

    @property
    def proxied(self) -> ClientProperties:
        """Properties of clients that connect through the proxy."""
        return ClientProperties.at(f"{HOST}:{self.proxy.port}")


@contextlib.contextmanager
def proxied_broker(folder: Path) -> Iterator[ProxiedBroker]:
    """Start a broker in `folder`, and a proxy that its second listener advertises."""
    port, second, controller = free_port(), free_port(), free_port()
    with KafkaProxy((HOST, second)) as proxy:
        overrides = {
            "listeners": f"PLAINTEXT://{HOST}:{port},PROXIED://{HOST}:{second},CONTROLLER://{HOST}:{controller}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{port},PROXIED://{HOST}:{proxy.port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "controller.quorum.voters": f"1@{HOST}:{controller}",
        }
        with start_broker(BrokerConfig(folder, port, overrides=overrides)) as broker:
            yield ProxiedBroker(broker, proxy)
