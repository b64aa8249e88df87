"""Waiting for brokers: it succeeds as soon as one answers, and says where and why while none does."""

from __future__ import annotations

import re
import socket
import threading
from pathlib import Path

import pytest

from infra.kafka.broker import Broker, BrokerConfig, free_port
from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import BrokerUnreachable, wait_for_brokers


def test_wait_for_brokers_needs_one_live_address(broker: Broker) -> None:
    waits: list[str] = []
    wait_for_brokers(
        ClientProperties.at(f"127.0.0.1:{free_port()},{broker.bootstrap_servers}"),
        deadline_s=5,
        on_wait=lambda elapsed, message: waits.append(message),
    )
    assert waits == []


def test_wait_for_brokers_waits_for_a_start(tmp_path: Path) -> None:
    port = free_port()
    waits: list[str] = []
    with Broker(BrokerConfig(tmp_path, port=port)) as broker:
        starter = threading.Thread(target=broker.start)
        wait_for_brokers(
            ClientProperties.at(f"127.0.0.1:{port}"),
            deadline_s=60,
            on_wait=lambda elapsed, message: (waits.append(message), starter.ident or starter.start()),
        )
        starter.join()
        assert broker.is_alive()
    assert re.match(rf"waiting for Kafka at 127.0.0.1:{port} \(\d+\.\d of 60 s\): 127.0.0.1:{port}: ", waits[0])
    assert "refused" in waits[0]


def test_wait_for_brokers_error_names_addresses_and_seconds() -> None:
    now = [0.0]
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    first, second = free_port(), free_port()
    lines: list[str] = []
    addresses = rf"127\.0\.0\.1:{first},127\.0\.0\.1:{second}"
    with pytest.raises(BrokerUnreachable, match=rf"{addresses} in 25\.0 s: .*refused.* is kafka\.addresses correct\?"):
        wait_for_brokers(
            ClientProperties.at(f"127.0.0.1:{first},127.0.0.1:{second}"),
            25,
            lambda elapsed, line: lines.append(line),
            setting="kafka.addresses",
            clock=lambda: now[0],
            sleep=sleep,
        )
    assert len(lines) == 3  # at 0 s, and every 10 s from then on
    assert pauses[0] == pytest.approx(0.1)
    assert pauses[:-1] == sorted(pauses[:-1])
    assert max(pauses) <= 2.0


def test_connection_problem_of_another_service() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(BrokerUnreachable, match=address):
            wait_for_brokers(ClientProperties.at(address), deadline_s=0.5)
