"""How two ends come to trust each other: same protocol, same run, and proof of the run's token without sending it."""

from __future__ import annotations

import hmac
import os
import socket

from infra.transport.frames import Frame, Kind, PeerGone, ProtocolError, TransportError, receive, send

PROTOCOL = 1
HANDSHAKE_S = 5.0
"""How long the other end may take to say who it is."""


class Refused(TransportError):
    """The other end does not want us: another run, another token, or too many connections."""


def welcome(connection: socket.socket, run: str, token: str, *, full: bool = False) -> int:
    """Let a peer in; its relay's number (−1: a trainer or a person's command). Raises Refused, ProtocolError, PeerGone.

    `full`: there is no room for another.
    """
    connection.settimeout(HANDSHAKE_S)
    nonce = os.urandom(32).hex()
    send(connection, Kind.CHALLENGE, protocol=PROTOCOL, nonce=nonce)
    hello = expect(receive(connection), Kind.HELLO).body
    reason = ""
    if hello.get("protocol") != PROTOCOL:
        reason = f"this relay speaks protocol {PROTOCOL}, not {str(hello.get('protocol'))[:20]}"
    elif hello.get("run") != run:
        reason = f"this relay serves run {run!r}, not {str(hello.get('run'))[:100]!r}"
    elif not hmac.compare_digest(str(hello.get("proof")).encode(), _proof(token, nonce, run).encode()):
        reason = "the token is not that of this run"
    elif full:
        reason = "this relay has as many connections as it takes"
    if reason:
        send(connection, Kind.REFUSED, reason=reason)
        raise Refused(reason)
    send(connection, Kind.WELCOME)
    connection.settimeout(None)
    relay = hello.get("relay")
    return relay if isinstance(relay, int) else -1


def introduce(connection: socket.socket, run: str, token: str, relay: int) -> None:
    """Be let in by the other end. Raises Refused, ProtocolError, PeerGone."""
    connection.settimeout(HANDSHAKE_S)
    challenge = expect(receive(connection), Kind.CHALLENGE).body
    nonce = str(challenge.get("nonce"))
    send(connection, Kind.HELLO, protocol=PROTOCOL, run=run, relay=relay, proof=_proof(token, nonce, run))
    answer = receive(connection)
    if answer.kind is Kind.REFUSED:
        raise Refused(str(answer.body.get("reason"))[:300])
    expect(answer, Kind.WELCOME)


def expect(frame: Frame, kind: Kind) -> Frame:
    """`frame`, which must be a `kind`. Raises ProtocolError."""
    if frame.kind is not kind:
        raise ProtocolError(f"a {frame.kind.name} where a {kind.name} belongs")
    return frame


def tune(connection: socket.socket) -> None:
    """Send at once, and notice in the end that a machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def connect(address: str, run: str, token: str, relay: int, timeout_s: float) -> socket.socket:
    """A connection to the relay at `address`, "host:port", that lets us in. Raises TransportError."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
    except (OSError, ValueError, OverflowError) as error:
        raise PeerGone(f"{address}: {error}") from error
    try:
        tune(connection)
        introduce(connection, run, token, relay)
        connection.settimeout(timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


def _proof(token: str, nonce: str, run: str) -> str:
    return hmac.new(token.encode(), f"{nonce} {run}".encode(), "sha256").hexdigest()
