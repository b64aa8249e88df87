"""Kafka with authentication, by password or by certificate, through a client.properties file."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kafka import KafkaProducer
from waiting import until

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import HOST, BrokerConfig, free_port, start_broker
from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import connection_problem
from infra.kafka.session import Outgoing, Session
from infra.kafka.session_config import Input, Partition, SessionConfig
from infra.kafka.topic_reader import read_topic
from pipelines.config import KafkaConfig
from pipelines.run.run_kafka import RunKafka
from schemas.codec import encode
from schemas.records import Metric

PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
PASSWORD, KEY_PASSWORD = "a word=;", "key word"
METRIC = Metric("seen", 1, {"x": 1.0}, 5)


class Authority:
    """A certificate authority for this machine; its own certificate is in `file`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name, self._key = folder, name, ec.generate_private_key(ec.SECP256R1())
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._sign(name, self._key, True).public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, password: str = "") -> Path:
        """A PEM file with a new key, encrypted with `password`, and its certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        encryption = (
            serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
        )
        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        file = self._folder / f"{name}.pem"
        file.write_bytes(key.private_bytes(pem, pkcs8, encryption) + self._sign(name, key, False).public_bytes(pem))
        return file

    def _sign(self, name: str, key: ec.EllipticCurvePrivateKey, authority: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        alternative_name = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))])
        return (
            x509.CertificateBuilder()
            .subject_name(_x509_name(name))
            .issuer_name(_x509_name(self._name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(alternative_name, critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _x509_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


@dataclass(frozen=True)
class SecuredBroker:
    """A broker with one listener per authentication method, and the files of its clients."""

    folder: Path
    by_password: str
    by_certificate: str

    def file(self, kind: str, **others: str) -> Path:
        """A valid client.properties for `kind`, with the changes in `others` (underscores for dots)."""
        properties = {
            "password": {
                "bootstrap.servers": self.by_password,
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "PLAIN",
                "sasl.jaas.config": f'{PLAIN} required username="laminar" password="${{env:KAFKA_PASSWORD}}";',
            },
            "certificate": {
                "bootstrap.servers": self.by_certificate,
                "security.protocol": "SSL",
                "ssl.truststore.location": str(self.folder / "authority.pem"),
                "ssl.keystore.location": str(self.folder / "client.pem"),
                "ssl.key.password": f"${{file:{self.folder / 'key-password'}}}",
            },
        }[kind] | {name.replace("_", "."): value for name, value in others.items()}
        file = self.folder / "client.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in properties.items() if value))
        return file


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    folder = tmp_path_factory.mktemp("guarded")
    authority = Authority(folder, "authority")
    Authority(folder, "stranger")
    authority.issue("client", KEY_PASSWORD)
    (folder / "key-password").write_text(f"{KEY_PASSWORD}\n")
    ports = {name: free_port() for name in ("PLAINTEXT", "SASL_PLAINTEXT", "SSL", "CONTROLLER")}
    listeners = {name: f"{name}://{HOST}:{port}" for name, port in ports.items()}
    config = BrokerConfig(
        folder / "kafka",
        port=ports["PLAINTEXT"],
        overrides={
            "listeners": ",".join(listeners.values()),
            "advertised.listeners": ",".join(each for name, each in listeners.items() if name != "CONTROLLER"),
            "controller.quorum.voters": f"1@{HOST}:{ports['CONTROLLER']}",
            "listener.security.protocol.map": ",".join(
                f"{name}:{'PLAINTEXT' if name == 'CONTROLLER' else name}" for name in ports
            ),
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl_plaintext.plain.sasl.jaas.config": f'{PLAIN} required user_laminar="{PASSWORD}";',
            "ssl.client.auth": "required",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(authority.issue("broker")),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(authority.file),
        },
    )
    with start_broker(config):
        yield SecuredBroker(folder, f"{HOST}:{ports['SASL_PLAINTEXT']}", f"{HOST}:{ports['SSL']}")


@pytest.fixture(autouse=True)
def _password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", PASSWORD)


@pytest.mark.parametrize("kind", ["password", "certificate"])
def test_session_authenticates_and_commits(kind: str, secured: SecuredBroker, run_id: str) -> None:
    client = KafkaConfig(client_properties=str(secured.file(kind))).client()
    request, response, restore = (Partition(f"{run_id}-{short_name}", 0) for short_name in ("in", "out", "restore"))
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(place.topic, 1) for place in (request, response, restore)])
    with KafkaProducer(**client.producer()) as producer:
        producer.send(request.topic, b"question").get(60)
    session = Session(SessionConfig(client, run_id, (Input(request.topic, (0,)),), restore, ledger=(response,)))
    try:
        while not (found := session.poll(0.5)):
            pass
        value, headers = encode(METRIC)
        session.commit([Outgoing(*response, None, value, headers)], session.positions(), {}, {})
    finally:
        session.close()
    assert [record.value for record in found] == [b"question"]
    # A topic shows a transaction some time after its commit.
    until(lambda: [record.rows for record in read_topic(client, response.topic)] == [(METRIC,)])


@pytest.mark.parametrize("kind", ["password", "certificate"])
def test_run_kafka_uses_client_properties(kind: str, secured: SecuredBroker, run_id: str, tmp_path: Path) -> None:
    notes: list[str] = []
    kafka = RunKafka(KafkaConfig(client_properties=str(secured.file(kind))), tmp_path / "kafka", notes.append)
    kafka.start()
    kafka.refuse_existing(run_id)
    until(kafka.answers)
    kafka.close()
    assert not (tmp_path / "kafka").exists()
    assert not any("starting" in note for note in notes)


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("password", {"sasl_jaas_config": f'{PLAIN} required username="laminar" password="guessed";'}),
        ("password", {"bootstrap_servers": "certificate"}),
        ("certificate", {"ssl_truststore_location": "stranger"}),
        ("certificate", {"ssl_keystore_location": "", "ssl_key_password": ""}),
    ],
)
def test_connection_problem_reports_failed_authentication(
    kind: str, others: dict[str, str], secured: SecuredBroker
) -> None:
    replacements = {"certificate": secured.by_certificate, "stranger": str(secured.folder / "stranger.pem")}
    file = secured.file(kind, **{name: replacements.get(value, value) for name, value in others.items()})
    reason = connection_problem(ClientProperties.from_file(file).admin(), timeout_s=1.0)
    assert reason is not None
    assert reason.endswith("are login and certificates correct?")
    assert "guessed" not in reason
