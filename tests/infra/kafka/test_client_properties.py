"""Client properties: Java's names in, each client's arguments out, no secret shown, nothing dropped."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer

from infra.kafka.broker import Broker
from infra.kafka.properties import _SETTINGS, ClientProperties, redact

AT = {"bootstrap.servers": "a:9092"}
PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
SASL = AT | {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}
TLS = AT | {"security.protocol": "SSL"}


def test_properties_apply_to_their_clients() -> None:
    properties = ClientProperties(
        {
            "bootstrap.servers": "a:9092, [::1]:9093",
            "client.id": "me",
            "request.timeout.ms": "5000",
            "send.buffer.bytes": "-1",
            "compression.type": "none",
            "linger.ms": "0",
            "batch.size": "1000",
            "max.request.size": "2000",
            "fetch.max.bytes": "3000",
            "check.crcs": "false",
        }
    )
    every = {
        "bootstrap_servers": ["a:9092", "[::1]:9093"],
        "client_id": "me",
        "request_timeout_ms": 5000,
        "metadata_max_age_ms": 10_000,
        "send_buffer_bytes": None,
    }
    assert properties.admin() == every
    assert properties.producer() == every | {
        "allow_auto_create_topics": False,
        "compression_type": None,
        "linger_ms": 0,
        "batch_size": 1000,
        "max_request_size": 2000,
    }
    assert properties.consumer() == every | {
        "allow_auto_create_topics": False,
        "fetch_max_bytes": 3000,
        "check_crcs": False,
    }
    assert properties.consumer(client_id="other")["client_id"] == "other"
    older = ClientProperties({"bootstrap.servers": "a:9092", "metadata.max.age.ms": "20000"})
    assert older.consumer()["metadata_max_age_ms"] == 20_000
    assert properties.bootstrap_servers == "a:9092,[::1]:9093"


def test_every_setting_exists_in_kafka_python() -> None:
    clients = {"consumer": KafkaConsumer, "producer": KafkaProducer, "admin": KafkaAdminClient}
    for name, (_, users) in _SETTINGS.items():
        for user in users:
            assert name.replace(".", "_") in clients[user].DEFAULT_CONFIG


def test_properties_need_only_an_address(broker: Broker, run_id: str) -> None:
    properties = ClientProperties({"bootstrap.servers": broker.bootstrap_servers, "client.id": run_id})
    with KafkaAdminClient(**properties.admin()) as client:
        assert [node["port"] for node in client.describe_cluster()["brokers"]] == [broker.port]


@pytest.mark.parametrize(
    ("mechanism", "jaas", "user", "password"),
    [
        ("PLAIN", f'{PLAIN} required username="alice" password="p=;w";', "alice", "p=;w"),
        ("PLAIN", f'{PLAIN}  required\n username="al\\"ice"\n password="back\\\\slash" ;', 'al"ice', "back\\slash"),
        ("PLAIN", f"{PLAIN} required username=alice password=secret;", "alice", "secret"),
        ("SCRAM-SHA-256", f'{SCRAM} required password="b" username="a";', "a", "b"),
        ("SCRAM-SHA-512", f'{SCRAM} required username="a" password="b" tokenauth="false";', "a", "b"),
    ],
)
def test_properties_set_user_and_password(mechanism: str, jaas: str, user: str, password: str) -> None:
    arguments = ClientProperties(SASL | {"sasl.mechanism": mechanism, "sasl.jaas.config": jaas}).admin()
    assert arguments["security_protocol"] == "SASL_PLAINTEXT"
    assert arguments["sasl_mechanism"] == mechanism
    assert (arguments["sasl_plain_username"], arguments["sasl_plain_password"]) == (user, password)


def test_properties_accept_pem_stores(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    (tmp_path / "me.pem").write_text("-----BEGIN PRIVATE KEY-----\n")
    stores = {
        "ssl.truststore.location": str(tmp_path / "ca.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.keystore.location": str(tmp_path / "me.pem"),
        "ssl.key.password": "pass",
    }
    arguments = ClientProperties(TLS | stores).consumer()
    assert arguments["ssl_cafile"] == str(tmp_path / "ca.pem")
    assert arguments["ssl_certfile"] == str(tmp_path / "me.pem")
    assert arguments["ssl_password"] == "pass"
    assert arguments["ssl_check_hostname"] is True
    unchecked = ClientProperties(TLS | {"ssl.endpoint.identification.algorithm": ""}).consumer()
    assert unchecked["ssl_check_hostname"] is False


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "bootstrap.servers is missing"),
        (AT | {"sasl.mechansim": "PLAIN"}, "sasl.mechansim is not .* did you mean 'sasl.mechanism'"),
        (AT | {"linger_ms": "1"}, "linger_ms is not .* did you mean 'linger.ms'"),
        (AT | {"group.id": "g"}, "group.id cannot be set: Laminar sets it"),
        (AT | {"ssl.keystore.password": "x"}, "only PEM stores"),
        ({"bootstrap.servers": "a"}, "bootstrap.servers='a': not a list of host:port"),
        ({"bootstrap.servers": ","}, "not a list of host:port"),
        (AT | {"request.timeout.ms": "5s"}, "request.timeout.ms='5s'"),
        (AT | {"compression.type": "brotli"}, "not one of none, gzip"),
        (AT | {"security.protocol": "TLS"}, "not one of plaintext, ssl"),
        (AT | {"sasl.mechanism": "PLAIN"}, "no effect with security.protocol=PLAINTEXT"),
        (TLS | {"sasl.mechanism": "PLAIN"}, "no effect with security.protocol=SSL"),
        (SASL | {"ssl.key.password": "p"}, "no effect with security.protocol=SASL_PLAINTEXT"),
        (SASL | {"sasl.mechanism": "GSSAPI"}, "'GSSAPI' is not one of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512"),
        (SASL, "sasl.jaas.config is not of the form"),
        (SASL | {"sasl.jaas.config": f'{SCRAM} required username="u" password="hush";'}, "PlainLoginModule"),
        (SASL | {"sasl.jaas.config": f'{PLAIN} required username="u" password="hush"'}, "is not of the form"),
        (SASL | {"sasl.jaas.config": f'{PLAIN} required user="u" password="hush";'}, "has no username"),
        (SASL | {"sasl.jaas.config": f"{PLAIN} ${{env:LAMINAR_NOT_SET}}"}, "sasl.jaas.config: .*LAMINAR_NOT_SET"),
        (TLS | {"ssl.truststore.type": "JKS"}, "ssl.truststore.type=JKS: only PEM"),
        (TLS | {"ssl.truststore.location": "/not/there"}, "/not/there: No such file"),
        (TLS | {"ssl.truststore.location": "/dev/null"}, "contains no PEM text"),
        (TLS | {"ssl.endpoint.identification.algorithm": "off"}, "neither https nor empty"),
    ],
)
def test_properties_name_the_error_without_secrets(entries: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        ClientProperties(entries).admin()
    assert "hush" not in str(raised.value)


def test_properties_read_file_of_kafka_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", 'a"=b')
    file = tmp_path / "client.properties"
    file.write_text(
        "# as for kafka-topics.sh --command-config\n"
        "bootstrap.servers=a:1,\\\n  b:2\n"
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\n"
        f'sasl.jaas.config={PLAIN} required username="u" password=${{env:KAFKA_PASSWORD}};\n'
    )
    properties = ClientProperties.from_file(file, client_id="me")
    assert properties.admin()["bootstrap_servers"] == ["a:1", "b:2"]
    assert properties.admin()["client_id"] == "me"
    file.write_text("bootstrap.servers=a:1\nclient.ids=1\n")
    with pytest.raises(ValueError, match=r"client\.properties: client\.ids is not a known client property"):
        ClientProperties.from_file(file)


def test_properties_do_not_expand_references_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAAS", f'{PLAIN} required username="u" password="hush";')
    properties = ClientProperties(SASL | {"sasl.jaas.config": "${env:JAAS}"})
    assert properties.admin()["sasl_plain_password"] == "hush"
    assert b"hush" not in pickle.dumps(properties)
    assert pickle.loads(pickle.dumps(properties)) == properties
    written_out = ClientProperties(SASL | {"sasl.jaas.config": f'{PLAIN} required username="u" password="hush";'})
    assert "hush" not in repr(written_out)
    assert "hush" not in str(written_out)
    assert "a:9092" in repr(written_out)
    assert redact({"ssl.key.password": "x", "sasl.jaas.config": "${env:JAAS}", "client.id": "me"}) == {
        "ssl.key.password": "[redacted]",
        "sasl.jaas.config": "${env:JAAS}",
        "client.id": "me",
    }


def test_properties_of_a_file_hold_no_password(tmp_path: Path) -> None:
    """They travel with each serialized pipeline; where that runs, the file is read again."""
    file = tmp_path / "client.properties"
    login = f'sasl.jaas.config={PLAIN} required username="u" \\\n  password="{{}}";\n'
    head = "bootstrap.servers=a:1\nsecurity.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\n"
    file.write_text(head + login.format("hush"))
    properties = ClientProperties.from_file(file)
    assert b"hush" not in pickle.dumps(properties)
    assert properties.admin()["sasl_plain_password"] == "hush"
    file.write_text(head + login.format("changed"))
    assert pickle.loads(pickle.dumps(properties)).admin()["sasl_plain_password"] == "changed"
    file.write_text(head)
    with pytest.raises(ValueError, match=r"client\.properties has no sasl\.jaas\.config"):
        properties.admin()
    file.unlink()
    with pytest.raises(ValueError, match=r"client\.properties:sasl\.jaas\.config\}: No such file"):
        properties.admin()
