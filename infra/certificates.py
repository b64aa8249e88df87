"""A private certificate authority, and the certificates that it issues for a local broker and for relays.

    python -m infra.certificates DIR [HOST...]

writes the files of relays: `relay-token`, `relay.pem` and `ca.pem`, to copy to every machine, and `ca.key`, which stays
in DIR and issues a new `relay.pem` if that is removed. With the host names of a gateway it also writes the gateway's
`gateway-secret` and `gateway.pem` (certificate and key).
"""

from __future__ import annotations

import datetime
import ipaddress
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infra.files import create_secret, write_private

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

VALID_DAYS = 3650
AUTHORITY = "laminar"
RELAY_NAME = "relay.laminar"
"""The name in a relay's certificate: the addresses of relays are not known in advance."""


@dataclass(frozen=True)
class Authority:
    """A certificate authority of this project."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @staticmethod
    def create() -> Authority:
        """Create a new authority."""
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        return Authority(_sign_certificate(AUTHORITY, (), key, key), key)

    @staticmethod
    def load(certificate: Path, key: Path) -> Authority:
        """Load the files that `write` has written. Raises OSError, ValueError for invalid files."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        loaded = serialization.load_pem_private_key(key.read_bytes(), None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key} is not the key of an authority of this project: it must be an elliptic-curve key")
        return Authority(x509.load_pem_x509_certificate(certificate.read_bytes()), loaded)

    def write(self, certificate: Path, key: Path) -> None:
        """Write the two files, readable by their owner only; the certificate itself is not secret."""
        write_private(certificate, _pem(self.certificate))
        write_private(key, _key_pem(self.key))

    def issue(self, name: str, hosts: tuple[str, ...]) -> str:
        """Issue a new key and its certificate for `name`, valid for `hosts` (addresses or names), as PEM."""
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        return _key_pem(key) + _pem(_sign_certificate(name, hosts, key, self.key))


def _sign_certificate(
    name: str, hosts: tuple[str, ...], key: ec.EllipticCurvePrivateKey, issuer_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)
    names = {each: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, AUTHORITY)}
    builder = (
        x509.CertificateBuilder()
        .subject_name(names[name])
        .issuer_name(names[AUTHORITY])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=key is issuer_key, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if hosts:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False
        )
    return builder.sign(issuer_key, hashes.SHA256())


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> str:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    from cryptography.hazmat.primitives import serialization

    form, bare = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, bare).decode()


def write_relay_files(folder: Path) -> list[Path]:
    """Create missing files of relays, readable by their owner only, and return those to copy to every machine.

    Raises OSError, ValueError for an invalid authority.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    token, relay, certificate, key = (folder / name for name in ("relay-token", "relay.pem", "ca.pem", "ca.key"))
    if not key.exists():
        Authority.create().write(certificate, key)
        relay.unlink(missing_ok=True)
    if not relay.exists():
        write_private(relay, Authority.load(certificate, key).issue("relay", (RELAY_NAME,)))
    if not token.exists():
        write_private(token, f"{secrets.token_hex(32)}\n")
    return [token, relay, certificate]


def write_gateway_files(folder: Path, hosts: Sequence[str]) -> list[Path]:
    """Create a gateway's secret if it is missing, and a new certificate for `hosts` by the authority in `folder`.

    Raises OSError, ValueError for an invalid authority.
    """
    secret, gateway = folder / "gateway-secret", folder / "gateway.pem"
    create_secret(secret)
    authority = Authority.load(folder / "ca.pem", folder / "ca.key")
    write_private(gateway, authority.issue("gateway", tuple(hosts)))
    return [secret, gateway]


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m infra.certificates DIR [HOST...]")
    _folder, _hosts = Path(sys.argv[1]), sys.argv[2:]
    for made in write_relay_files(_folder) + (write_gateway_files(_folder, _hosts) if _hosts else []):
        print(made)
