"""TLS between relays: each end has a certificate of the run's authority, and shows it.

Relays have addresses that nobody knows beforehand, so a certificate is valid for one name, `NAME`, and not for hosts:
what counts is that the authority issued it for a relay. A certificate of the authority's for something else, as the
broker's, is refused.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from functools import lru_cache

from infra.certificates import RELAY_NAME as NAME
from infra.transport.frames import PeerGone, ProtocolError


@dataclass(frozen=True)
class Tls:
    """The files of one end: its key and certificate in one PEM file, and the certificate of the authority."""

    certificate: str
    authority: str

    def check(self) -> None:
        """Raise ValueError where the files are not there, or do not fit each other."""
        _context(self, server_side=True)

    def accept(self, connection: socket.socket) -> ssl.SSLSocket:
        """The server's end over `connection`, which it takes over; nothing has been said yet."""
        return _context(self, server_side=True).wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def dial(self, connection: socket.socket) -> ssl.SSLSocket:
        """The client's end, as `accept`."""
        context = _context(self, server_side=False)
        return context.wrap_socket(connection, server_hostname=NAME, do_handshake_on_connect=False)


def shake_hands(connection: socket.socket, within_s: float) -> None:
    """Where `connection` is TLS, agree on keys and see the other's certificate, in `within_s` seconds in all.

    Raises PeerGone, and ProtocolError for one that is not of a relay of this authority.
    """
    if not isinstance(connection, ssl.SSLSocket):
        return
    connection.settimeout(within_s)
    try:
        connection.do_handshake()
    except ssl.SSLError as error:
        raise ProtocolError(f"no TLS with this peer: {error.reason or error}") from error
    except OSError as error:
        raise PeerGone(f"{error}") from error
    names = (connection.getpeercert() or {}).get("subjectAltName", ())
    if ("DNS", NAME) not in names:
        raise ProtocolError(f"the peer's certificate is for {names!r}, not for {NAME}")


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
        raise ValueError(f"{named} do not serve: {error}") from error
    if server_side:
        context.num_tickets = 0
    return context
