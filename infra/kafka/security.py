"""Authentication of a local broker: its own certificate authority and a user for each role; no anonymous access.

All files are in one folder that only its owner may read:

    ca.pem               the authority's certificate, which clients trust
    ca.key               its private key, for further certificates
    relay.pem            a key and certificate for relays: `relay.certificate_file`, with ca.pem as `authority_file`
    broker.pem           the broker's key and certificate
    score.properties     client properties of user `score`, by Java's names
    score.password       the password to which they refer

Clients authenticate with SCRAM over TLS. The controller has no users yet when a broker starts, and authenticates by
certificate.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from infra.certificates import RELAY_NAME, Authority
from infra.files import write_private
from infra.kafka.java_properties import properties_text

ADMIN, BROKER = "admin", "broker"
MECHANISM = "SCRAM-SHA-512"
_LOGIN = "org.apache.kafka.common.security.scram.ScramLoginModule"
_AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"


@dataclass(frozen=True)
class Security:
    """The secrets of a broker at `host`, in `folder`."""

    folder: Path
    host: str

    @property
    def users(self) -> list[str]:
        """The users with a password."""
        return sorted(file.stem for file in self.folder.glob("*.password"))

    def properties_file(self, user: str) -> Path:
        """The client properties file of `user`."""
        return self.folder / f"{user}.properties"

    def create(self, users: Iterable[str]) -> None:
        """Create the missing ones of authority, certificates and passwords, including those of `users`."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (self.folder / "broker.pem").exists():
            _create_certificates(self.folder, self.host)
        for user in (ADMIN, BROKER, *users):
            if not (file := self.folder / f"{user}.password").exists():
                write_private(file, f"{secrets.token_hex(24)}\n")

    def write_clients(self, bootstrap_servers: str) -> None:
        """Write a client.properties for each user."""
        for user in self.users:
            password = f"${{file:{self.folder.absolute() / user}.password}}"
            entries = {
                "bootstrap.servers": bootstrap_servers,
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": MECHANISM,
                "sasl.jaas.config": f'{_LOGIN} required username="{user}" password="{password}";',
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": str(self.folder.absolute() / "ca.pem"),
            }
            write_private(self.properties_file(user), properties_text(entries))

    def server_properties(self, port: int, controller_port: int) -> dict[str, str]:
        """The entries that a secure broker adds to, or overrides in, server.properties. They contain a secret."""
        listener, folder = f"SASL_SSL://{self.host}:{port}", self.folder.absolute()
        return {
            "listeners": f"{listener},CONTROLLER://{self.host}:{controller_port}",
            "advertised.listeners": listener,
            "inter.broker.listener.name": "SASL_SSL",
            "listener.security.protocol.map": "SASL_SSL:SASL_SSL,CONTROLLER:SSL",
            "sasl.enabled.mechanisms": MECHANISM,
            "sasl.mechanism.inter.broker.protocol": MECHANISM,
            f"listener.name.sasl_ssl.{MECHANISM.lower()}.sasl.jaas.config": (
                f'{_LOGIN} required username="{BROKER}" password="{self._password(BROKER)}";'
            ),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(folder / "broker.pem"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(folder / "ca.pem"),
            "listener.name.controller.ssl.client.auth": "required",
            "authorizer.class.name": _AUTHORIZER,
            "allow.everyone.if.no.acl.found": "false",
            "super.users": f"User:{ADMIN};User:{BROKER};User:CN={BROKER}",
        }

    def format_arguments(self) -> list[str]:
        """Arguments for formatting a broker's storage, so that its users exist from the first start."""
        return [
            word
            for user in self.users
            for word in ("--add-scram", f"{MECHANISM}=[name={user},password={self._password(user)}]")
        ]

    def _password(self, user: str) -> str:
        return (self.folder / f"{user}.password").read_text().strip()


def _create_certificates(folder: Path, host: str) -> None:
    authority = Authority.create()
    authority.write(folder / "ca.pem", folder / "ca.key")
    write_private(folder / "broker.pem", authority.issue(BROKER, (host,)))
    write_private(folder / "relay.pem", authority.issue("relay", (RELAY_NAME,)))
