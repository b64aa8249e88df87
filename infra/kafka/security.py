"""What makes a local broker one that asks: an authority of its own, a user for each role, and nothing for strangers.

Everything is in one folder that its owner alone may read:

    ca.pem               the authority's certificate, which clients trust
    broker.pem           the broker's key and certificate
    score.properties     how user `score` reaches the broker, by Java's names
    score.password       what it refers to

Clients come over TLS with SCRAM; the controller, which has no users yet when a broker starts, by certificate.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ADMIN, BROKER = "admin", "broker"
MECHANISM = "SCRAM-SHA-512"
VALID_DAYS = 3650
_LOGIN = "org.apache.kafka.common.security.scram.ScramLoginModule"
_AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"


@dataclass(frozen=True)
class Security:
    """The secrets of a broker at `host`, in `folder`."""

    folder: Path
    host: str

    @property
    def users(self) -> list[str]:
        """Who has a password."""
        return sorted(file.stem for file in self.folder.glob("*.password"))

    def properties_file(self, user: str) -> Path:
        """How `user` reaches the broker."""
        return self.folder / f"{user}.properties"

    def make(self, users: Iterable[str]) -> None:
        """Make authority, certificate and passwords, those of `users` included, where there are none."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (self.folder / "broker.pem").exists():
            _make_certificates(self.folder, self.host)
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
            write_private(self.properties_file(user), "".join(f"{k}={v}\n" for k, v in entries.items()))

    def server_properties(self, port: int, controller_port: int) -> dict[str, str]:
        """What the broker's server.properties has beside, or instead of, those of an open one. They hold a secret."""
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
        """What a broker's storage is formatted with, so that it knows its users from the first start on."""
        return [
            word
            for user in self.users
            for word in ("--add-scram", f"{MECHANISM}=[name={user},password={self._password(user)}]")
        ]

    def _password(self, user: str) -> str:
        return (self.folder / f"{user}.password").read_text().strip()


def write_private(file: Path, text: str) -> None:
    """Write a file that nobody else may read, at no moment."""
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(text)


def _make_certificates(folder: Path, host: str) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def signed(name: str, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        named = {each: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, "laminar")}
        return (
            x509.CertificateBuilder()
            .subject_name(named[name])
            .issuer_name(named["laminar"])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
            .add_extension(x509.BasicConstraints(ca=key is by, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]), critical=False)
            .sign(by, hashes.SHA256())
            .public_bytes(serialization.Encoding.PEM)
        )

    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    key = own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_private(folder / "ca.pem", signed("laminar", authority, authority).decode())
    write_private(folder / "broker.pem", key.decode() + signed(BROKER, own, authority).decode())
