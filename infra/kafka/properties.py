"""Client properties: Kafka's Java names, converted to kafka-python's arguments.

A `client.properties` that works with Apache Kafka's scripts works here. An unknown name is an error and is never
ignored: a misspelt security setting must not lead to an insecure connection.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from infra.kafka.client_patches import patch_clients
from infra.kafka.java_properties import expand_references, has_reference, is_reference, parse_properties
from infra.name_lookup import suggest_name

CONSUMER, PRODUCER, ADMIN = "consumer", "producer", "admin"
_EVERY = (CONSUMER, PRODUCER, ADMIN)
METADATA_MAX_AGE_MS = 10_000
"""How old a client's knowledge of leaders may be (default 5 min). A leader that is cut off from the other brokers
responds without an error, and its readers see nothing new until they request metadata again."""
_LOGIN_MODULES = {"PLAIN": "PlainLoginModule", "SCRAM-SHA-256": "ScramLoginModule", "SCRAM-SHA-512": "ScramLoginModule"}


def _buffer(value: str) -> int | None:
    return None if int(value) == -1 else int(value)  # Java's -1 is kafka-python's None: the system's default


def _one_of(**choices: Any) -> Callable[[str], Any]:
    def read(value: str) -> Any:
        if value.lower() not in choices:
            raise ValueError(f"not one of {', '.join(choices)}")
        return choices[value.lower()]

    return read


_boolean = _one_of(true=True, false=False)
_compression = _one_of(none=None, gzip="gzip", snappy="snappy", lz4="lz4", zstd="zstd")
_protocol = _one_of(plaintext="PLAINTEXT", ssl="SSL", sasl_plaintext="SASL_PLAINTEXT", sasl_ssl="SASL_SSL")


def parse_servers(value: str) -> list[str]:
    """The brokers that `value` lists. Raises ValueError unless each is host:port."""
    servers = [server.strip() for server in value.split(",") if server.strip()]
    if not servers or not all(re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\s]+):\d{1,5}", server) for server in servers):
        raise ValueError("not a list of host:port,host:port")
    return servers


# Java's name (kafka-python's with underscores) -> parser of its value, and the clients it applies to.
_SETTINGS: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    "bootstrap.servers": (parse_servers, _EVERY),
    "client.id": (str, _EVERY),
    "client.dns.lookup": (str, _EVERY),
    "security.protocol": (_protocol, _EVERY),
    "request.timeout.ms": (int, _EVERY),
    "retry.backoff.ms": (int, _EVERY),
    "reconnect.backoff.ms": (int, _EVERY),
    "reconnect.backoff.max.ms": (int, _EVERY),
    "connections.max.idle.ms": (int, _EVERY),
    "metadata.max.age.ms": (int, _EVERY),
    "receive.buffer.bytes": (_buffer, _EVERY),
    "send.buffer.bytes": (_buffer, _EVERY),
    "compression.type": (_compression, (PRODUCER,)),
    "linger.ms": (int, (PRODUCER,)),
    "batch.size": (int, (PRODUCER,)),
    "max.request.size": (int, (PRODUCER,)),
    "max.block.ms": (int, (PRODUCER,)),
    "delivery.timeout.ms": (int, (PRODUCER,)),
    "client.rack": (str, (CONSUMER,)),
    "fetch.max.bytes": (int, (CONSUMER,)),
    "fetch.min.bytes": (int, (CONSUMER,)),
    "fetch.max.wait.ms": (int, (CONSUMER,)),
    "max.partition.fetch.bytes": (int, (CONSUMER,)),
    "max.poll.records": (int, (CONSUMER,)),
    "max.poll.interval.ms": (int, (CONSUMER,)),
    "session.timeout.ms": (int, (CONSUMER,)),
    "heartbeat.interval.ms": (int, (CONSUMER,)),
    "check.crcs": (_boolean, (CONSUMER,)),
}
# Converted to kafka-python arguments together, in _security.
_SECURITY = (
    "sasl.mechanism",
    "sasl.jaas.config",
    "ssl.truststore.location",
    "ssl.truststore.type",
    "ssl.keystore.location",
    "ssl.keystore.type",
    "ssl.key.password",
    "ssl.endpoint.identification.algorithm",
)
_OURS = "Laminar sets it; remove it"
_PEM = "only PEM stores are supported, and they have no password; convert with `keytool` and `openssl pkcs12`"
_REJECTED = {
    **dict.fromkeys(("group.id", "enable.auto.commit", "auto.offset.reset", "isolation.level"), _OURS),
    **dict.fromkeys(("acks", "enable.idempotence", "transactional.id", "transaction.timeout.ms"), _OURS),
    **dict.fromkeys(("key.serializer", "value.serializer", "key.deserializer", "value.deserializer"), _OURS),
    **dict.fromkeys(("ssl.truststore.password", "ssl.keystore.password"), _PEM),
    **dict.fromkeys(
        ("ssl.truststore.certificates", "ssl.keystore.certificate.chain", "ssl.keystore.key"),
        "give the PEM file's path: ssl.truststore.location, ssl.keystore.location",
    ),
    **dict.fromkeys(("ssl.protocol", "ssl.enabled.protocols"), "TLS 1.2 or newer is always used"),
    "ssl.cipher.suites": "the client has no such setting; the system's OpenSSL decides",
    "buffer.memory": "the client has no such bound; the sinks bound the outputs that wait by their number",
}
# A topic that a client's request creates would have the brokers' defaults: one partition, records deleted after a week.
_NEVER_CREATE = {"allow_auto_create_topics": False}
_SECRET = re.compile(r"password|secret|jaas|token|credential", re.IGNORECASE)


def redact(properties: Mapping[str, str]) -> dict[str, str]:
    """Return properties for a log: secrets are replaced, `${env:...}` and `${file:...}` references are kept."""
    return {
        name: "[redacted]" if _SECRET.search(name) and not is_reference(value) else value
        for name, value in properties.items()
    }


class LogClients(Protocol):
    """Clients of a log, with the methods of kafka-python's that commands use."""

    def admin(self) -> Any:
        """A KafkaAdminClient."""

    def consumer(self) -> Any:
        """A consumer of committed records by batches, see `infra.kafka.consumers.new_consumer`."""

    def producer(self) -> Any:
        """A BoundedProducer."""

    def pause(self, seconds: float, /) -> None:
        """Wait."""


@dataclass(frozen=True, repr=False)
class ClientProperties:
    """Address of and login to Kafka, by Java's names.

    References to secrets are not expanded here, so a serialized pipeline contains no secret; they are expanded when a
    client is created. Raises ValueError for an unknown name, with the most similar known one, for one that must not be
    set, and if `bootstrap.servers` is missing.
    """

    entries: Mapping[str, str] = field(hash=False)
    log: Path | None = None
    """The log folder of a stopped broker, whose files readers read; there is no broker to connect to."""
    clients: LogClients | None = field(default=None, compare=False)
    """The clients of a log in memory; there is no broker to connect to."""

    def __post_init__(self) -> None:
        for name in self.entries:
            _check_name(name)
        if self.log is None and self.clients is None and "bootstrap.servers" not in self.entries:
            raise ValueError("bootstrap.servers is missing: give the addresses of the brokers, as host:port,host:port")

    @classmethod
    def at(cls, bootstrap_servers: str) -> ClientProperties:
        """Return the properties of a cluster without authentication at `host:port[,host:port]`."""
        return cls({"bootstrap.servers": bootstrap_servers})

    @classmethod
    def from_file(cls, path: Path, **more: str) -> ClientProperties:
        """Return the properties in a Java `client.properties`; `more` overrides the file (dots as underscores).

        A password in the file itself becomes a reference to its entry, because pipelines are serialized. Raises
        ValueError with the file's name if it is invalid, OSError if it cannot be read.
        """
        try:
            entries = parse_properties(path.read_text(encoding="utf-8"))
            for name, value in entries.items():
                if _SECRET.search(name) and not has_reference(value):
                    entries[name] = f"${{file:{path.absolute()}:{name}}}"
            return cls(entries | {name.replace("_", "."): value for name, value in more.items()})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def of_log(cls, log: Path) -> ClientProperties:
        """Return the properties for reading the log of a stopped broker in the folder `log`."""
        return cls({}, log)

    @classmethod
    def of_clients(cls, clients: LogClients) -> ClientProperties:
        """Return the properties for the log of `clients`."""
        return cls({}, clients=clients)

    def pause(self, seconds: float) -> None:
        """Wait before a request is repeated."""
        (time.sleep if self.clients is None else self.clients.pause)(seconds)

    @property
    def bootstrap_servers(self) -> str:
        """The brokers' addresses, `host:port[,host:port]`."""
        name = "bootstrap.servers"
        return ",".join(parse_servers(_expanded(name, self.entries[name])))

    def consumer(self, **arguments: Any) -> dict[str, Any]:
        """Return the keyword arguments of a KafkaConsumer; `arguments` take precedence. Raises ValueError."""
        return self._arguments(CONSUMER) | arguments

    def producer(self, **arguments: Any) -> dict[str, Any]:
        """Return the keyword arguments of a KafkaProducer; `arguments` take precedence. Raises ValueError."""
        return self._arguments(PRODUCER) | arguments

    def admin(self, **arguments: Any) -> dict[str, Any]:
        """Return the keyword arguments of a KafkaAdminClient; `arguments` take precedence. Raises ValueError."""
        return self._arguments(ADMIN) | arguments

    def __repr__(self) -> str:
        return f"ClientProperties({self.log or redact(self.entries)})"

    def _arguments(self, client: str) -> dict[str, Any]:
        if self.log is not None:
            raise RuntimeError(f"the broker of {self.log} is stopped, and its log can only be read")
        patch_clients()
        values = {name: _expanded(name, value) for name, value in self.entries.items()}
        arguments: dict[str, Any] = {"metadata_max_age_ms": METADATA_MAX_AGE_MS}
        for name, value in values.items():
            if name in _SECURITY:
                continue
            read, clients = _SETTINGS[name]
            argument = _read(name, value, read)  # for every kind of client, so that any client reports an invalid value
            if client in clients:
                arguments[name.replace(".", "_")] = argument
        return arguments | _security(values) | ({} if client == ADMIN else _NEVER_CREATE)


def _check_name(name: str) -> None:
    if name in _SETTINGS or name in _SECURITY:
        return
    if name in _REJECTED:
        raise ValueError(f"{name} cannot be set: {_REJECTED[name]}")
    raise ValueError(f"{name} is not a known client property{suggest_name(name, [*_SETTINGS, *_SECURITY])}")


def _expanded(name: str, value: str) -> str:
    try:
        return expand_references(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _read(name: str, value: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{name}={value!r}: {error}") from error


def _security(values: Mapping[str, str]) -> dict[str, Any]:
    protocol = values.get("security.protocol", "PLAINTEXT").upper()
    sasl, tls = protocol.startswith("SASL_"), protocol.endswith("SSL")
    for name in values:
        wanted = "SASL_PLAINTEXT or SASL_SSL" if name.startswith("sasl.") else "SSL or SASL_SSL"
        if (name.startswith("sasl.") and not sasl) or (name.startswith("ssl.") and not tls):
            raise ValueError(f"{name} has no effect with security.protocol={protocol}; set it to {wanted}")
    return (_login(values) if sasl else {}) | (_tls(values) if tls else {})


def _login(values: Mapping[str, str]) -> dict[str, Any]:
    mechanism = values.get("sasl.mechanism", "")
    if mechanism not in _LOGIN_MODULES:
        raise ValueError(f"sasl.mechanism={mechanism!r} is not one of {', '.join(_LOGIN_MODULES)}")
    # The text is never in a message: it contains the password.
    text = values.get("sasl.jaas.config", "")
    match = re.fullmatch(r"\s*([\w.]+)\s+required\b(.*?);\s*", text, re.DOTALL)
    if match is None or not match[1].endswith("." + _LOGIN_MODULES[mechanism]):
        raise ValueError(
            f"sasl.jaas.config is not of the form `org.apache.kafka.common.security...{_LOGIN_MODULES[mechanism]} "
            f'required username="..." password="...";`, which sasl.mechanism={mechanism} requires'
        )
    options = {
        name: re.sub(r"\\(.)", r"\1", quoted) if quoted or not bare else bare
        for name, quoted, bare in re.findall(r'(\w+)\s*=\s*(?:"((?:\\.|[^"\\])*)"|([^\s";]+))', match[2])
    }
    if missing := [name for name in ("username", "password") if not options.get(name)]:
        raise ValueError(f"sasl.jaas.config has no {' and no '.join(missing)}")
    return {
        "sasl_mechanism": mechanism,
        "sasl_plain_username": options["username"],
        "sasl_plain_password": options["password"],
    }


def _tls(values: Mapping[str, str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for store, argument in (("truststore", "ssl_cafile"), ("keystore", "ssl_certfile")):
        kind = values.get(f"ssl.{store}.type", "PEM")
        if kind.upper() != "PEM":
            raise ValueError(f"ssl.{store}.type={kind}: {_PEM}")
        if (path := values.get(f"ssl.{store}.location")) is None:
            continue
        try:
            pem = b"-----BEGIN" in Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"ssl.{store}.location={path}: {error.strerror}") from error
        if not pem:
            raise ValueError(f"ssl.{store}.location={path} contains no PEM text: {_PEM}")
        arguments[argument] = path
    if "ssl.key.password" in values:
        arguments["ssl_password"] = values["ssl.key.password"]
    identification = values.get("ssl.endpoint.identification.algorithm", "https")
    if identification not in ("", "https"):
        raise ValueError(f"ssl.endpoint.identification.algorithm={identification!r} is neither https nor empty")
    arguments["ssl_check_hostname"] = identification == "https"
    return arguments
