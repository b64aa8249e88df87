"""A broker may respond at the given address and advertise another, which this machine does not reach."""

from __future__ import annotations

import itertools
import socket
from typing import Any

import pytest
from faults.proxied_broker import ProxiedBroker

from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import BrokerUnreachable, connection_problem, wait_for_brokers


def test_an_unreachable_advertised_address_is_named(proxied: ProxiedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ClientProperties.at("{}:{}".format(*proxied.proxy.upstream))  # the listener behind the proxy
    wait_for_brokers(given, 60)
    connect = socket.create_connection

    def without_the_proxy(address: tuple[str, int], **how: Any) -> socket.socket:
        if address[1] == proxied.proxy.port:
            raise ConnectionRefusedError(111, "Connection refused")
        return connect(address, **how)

    monkeypatch.setattr("infra.kafka.readiness.socket.create_connection", without_the_proxy)
    assert connection_problem(given.admin()) is None
    advertised = (
        rf"broker 1 advertises 127\.0\.0\.1:{proxied.proxy.port}, which does not .*refused.* advertised\.listeners"
    )
    with pytest.raises(BrokerUnreachable, match=advertised):
        wait_for_brokers(given, 60, clock=itertools.count(0, 60).__next__)  # one attempt, with time to respond
