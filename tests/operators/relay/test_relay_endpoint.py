"""The configuration of a relay's endpoint: addresses, the token, certificates."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.certificates import write_relay_files
from infra.transport.endpoint import Endpoint
from infra.transport.tls import Tls
from operators.relay.config import RelayConfig

KAFKA = "127.0.0.1:9092"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, r"accepts other machines: set the same token_file on all\. Weights .* clear text: set certificate_file"),
        (
            {"token_file": "t"},
            "machines: Weights and KV are sent in clear text: set certificate_file and authority_file",
        ),
        ({"clear_text": True}, r"accepts other machines: set the same token_file on all\. \("),
        ({"token_file": "t", "certificate_file": "c"}, "set both certificate_file and authority_file"),
    ],
)
def test_relay_config_requires_token_and_tls_beyond_loopback(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RelayConfig(listen="0.0.0.0", **fields)


def test_relay_config_checks_tls_files(tmp_path: Path) -> None:
    token, certificate, authority = map(str, write_relay_files(tmp_path / "it"))
    config = RelayConfig(listen="0.0.0.0", token_file=token, certificate_file=certificate, authority_file=authority)
    assert config.endpoint(KAFKA).tls == Tls(certificate, authority)
    with pytest.raises(ValueError, match="cannot be used"):
        replace(config, authority_file=str(tmp_path / "none")).endpoint(KAFKA)


@pytest.mark.parametrize(
    ("fields", "brokers", "address"),
    [
        ({}, KAFKA, "127.0.0.1:7401"),
        ({"port": 7400}, KAFKA, "127.0.0.1:7400"),
        ({"listen": "0.0.0.0"}, KAFKA, "127.0.0.1:7401"),  # the way to Kafka
        ({"listen": "0.0.0.0", "port": 7400, "advertise": "10.1.2.3:7400"}, "10.0.0.9:9092", "10.1.2.3:7400"),
        ({"listen": "10.1.2.3"}, "10.0.0.9:9092,10.0.0.8:9092", "10.1.2.3:7401"),
    ],
)
def test_endpoint_advertises_an_address(fields: dict[str, Any], brokers: str, address: str, token: str) -> None:
    endpoint = RelayConfig(token_file=token, clear_text=True, **fields).endpoint(brokers)
    assert endpoint.relay_address(7401 if endpoint.port == 0 else endpoint.port) == address


@pytest.mark.parametrize("advertise", ["127.0.0.1:7400", "localhost:7400", "0.0.0.0:7400", "[::]:7400"])
def test_endpoint_rejects_unreachable_addresses(advertise: str, token: str) -> None:
    config = RelayConfig(listen="0.0.0.0", advertise=advertise, token_file=token, clear_text=True)
    with pytest.raises(ValueError, match="is no address that other machines can reach"):
        config.endpoint("10.0.0.9:9092")


def test_endpoint_without_a_way_to_kafka_names_the_setting(token: str) -> None:
    config = RelayConfig(listen="0.0.0.0", token_file=token, clear_text=True)
    with pytest.raises(ValueError, match=r"no way to Kafka at kafka\.invalid \(.*\); set relay.advertise"):
        config.endpoint("kafka.invalid:9092")


def test_endpoint_is_found_while_a_broker_has_no_address(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes removes the name of a broker's pod while that is replaced."""

    def towards(host: str) -> str:
        if host == "kafka-0":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return {"kafka-1": "10.1.2.3"}[host]

    monkeypatch.setattr("operators.relay.config.own_address_towards", towards)
    config = RelayConfig(listen="0.0.0.0", port=7400, token_file=token, clear_text=True)
    endpoint = config.endpoint("kafka-0:9092,kafka-1:9092,kafka-2:9092")
    assert endpoint.relay_address(7400) == "10.1.2.3:7400"


@pytest.fixture
def token(tmp_path: Path) -> str:
    file = tmp_path / "token"
    file.write_text("a-secret-of-relays\n")
    return str(file)


def test_relay_config_reads_the_token_from_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-secret-of-relays\nmore\n")
    config = RelayConfig(listen="0.0.0.0", token_file=str(file), clear_text=True)
    assert config.endpoint(KAFKA) == Endpoint("0.0.0.0", advertised="127.0.0.1:0", token="a-secret-of-relays")
    file.write_text("fifteen-letters\n")
    with pytest.raises(ValueError, match=r"token_file: the secret in .* has 15 characters, it must have at least 16"):
        config.endpoint(KAFKA)
