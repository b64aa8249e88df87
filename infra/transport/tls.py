"""The mutual TLS handshake of relays: each end presents a certificate issued by the run's authority.

The addresses of relays are not known in advance, so a certificate is valid for one name, `NAME`, and not for hosts:
the authority must have issued it for a relay. A certificate that the authority issued for something else, such as the
broker, is rejected.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from infra.certificates import RELAY_NAME as NAME
from infra.transport.connection import Connection
from infra.transport.frames import PeerGone, ProtocolError


@dataclass(frozen=True)
class Tls:
    """The TLS files of one end: its key and certificate in one PEM file, and the certificate of the authority."""

    certificate: str
    authority: str

    def check(self) -> None:
        """Raise ValueError if a file is missing or the files do not match."""
        _context(self, server_side=True)

    def wrap_server(self, connection: Connection) -> ssl.SSLSocket:
        """Wrap `connection` as the server's end; the handshake has not started yet."""
        context = _context(self, server_side=True)
        return context.wrap_socket(_socket(connection), server_side=True, do_handshake_on_connect=False)

    def wrap_client(self, connection: Connection) -> ssl.SSLSocket:
        """Wrap `connection` as the client's end; the handshake has not started yet."""
        context = _context(self, server_side=False)
        return context.wrap_socket(_socket(connection), server_hostname=NAME, do_handshake_on_connect=False)


def tls_handshake(connection: Connection, timeout_s: float) -> None:
    """If `connection` is TLS, complete the TLS handshake and verify the peer's certificate within `timeout_s` seconds.

    Raises PeerGone, and ProtocolError for a certificate that this authority did not issue for a relay.
    """
    if not isinstance(connection, ssl.SSLSocket):
        return
    connection.settimeout(timeout_s)
    with _transport_errors("the TLS handshake"):
        connection.do_handshake()
    names = (connection.getpeercert() or {}).get("subjectAltName", ())
    if ("DNS", NAME) not in names:
        raise ProtocolError(f"the peer's certificate is for {names!r}, not for {NAME}")


def end_tls(connection: ssl.SSLSocket) -> None:
    """End TLS on both sides, within the connection's timeout; `connection` is a plain socket then.

    Raises PeerGone, ProtocolError.
    """
    with _transport_errors("the end of the TLS handshake"):
        connection.unwrap()


@contextmanager
def _transport_errors(action: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        raise ProtocolError(f"{action} failed: {error.reason or error}") from error
    except OSError as error:
        raise PeerGone(f"{error}") from error


def _socket(connection: Connection) -> socket.socket:
    if not isinstance(connection, socket.socket):
        raise TypeError(f"TLS needs a socket, not a {type(connection).__name__}")
    return connection


@lru_cache(maxsize=8)
def _context(files: Tls, *, server_side: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(files.certificate)
        context.load_verify_locations(files.authority)
    except OSError as error:  # ssl.SSLError is one
        named = f"relay.certificate_file {files.certificate} and relay.authority_file {files.authority}"
        raise ValueError(f"{named} cannot be used: {error}") from error
    if server_side:
        context.num_tickets = 0
    return context
