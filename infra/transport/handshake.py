"""How two ends come to trust each other: TLS where it is set up, then the same protocol, the same run, and proof on
both sides of the run's token, which is never sent.

The token alone keeps out whoever cannot read or change what passes between two relays. Who can is kept out by TLS.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import time
from collections.abc import Callable

from infra.transport.frames import Frame, FrameKind, PeerGone, ProtocolError, TransportError, receive, send
from infra.transport.tls import Tls, shake_hands

PROTOCOL = 2
HANDSHAKE_S = 5.0
"""How long the handshake may take in all, TLS included."""
SERVER, CLIENT = "server", "client"
_NONCE = 64


class HandshakeRejected(TransportError):
    """The other end does not want us: another run, another token, or too many connections."""


def welcome(connection: socket.socket, run: str, token: str, *, admit: Callable[[], bool] = lambda: True) -> int:
    """Let a peer in; its relay's number (−1: a trainer or a person's command). Raises Refused, ProtocolError, PeerGone.

    `admit` is asked once the peer has proved that it knows the token: whether there is room for another.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    shake_hands(connection, HANDSHAKE_S)
    nonce = os.urandom(_NONCE // 2).hex()
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    send(connection, FrameKind.CHALLENGE, protocol=PROTOCOL, nonce=nonce)
    hello = expect(receive(connection, deadline), FrameKind.HELLO).body
    nonces = (nonce, str(hello.get("nonce"))[:_NONCE])
    reason = ""
    if hello.get("protocol") != PROTOCOL:
        reason = f"this relay speaks protocol {PROTOCOL}, not {str(hello.get('protocol'))[:20]}"
    elif hello.get("run") != run:
        reason = f"this relay serves run {run!r}, not {str(hello.get('run'))[:100]!r}"
    elif not _proves(hello.get("proof"), CLIENT, token, nonces, run):
        reason = "the token is not that of this run"
    elif not admit():
        reason = "this relay has as many connections as it takes"
    if reason:
        send(connection, FrameKind.REFUSED, reason=reason)
        raise HandshakeRejected(reason)
    send(connection, FrameKind.WELCOME, proof=_proof(SERVER, token, nonces, run))
    connection.settimeout(None)
    relay = hello.get("relay")
    return relay if isinstance(relay, int) else -1


def introduce(connection: socket.socket, run: str, token: str, relay: int) -> None:
    """Be let in by the other end, which proves its token, too. Raises Refused, ProtocolError, PeerGone."""
    deadline = time.monotonic() + HANDSHAKE_S
    shake_hands(connection, HANDSHAKE_S)
    challenge = expect(receive(connection, deadline), FrameKind.CHALLENGE).body
    if challenge.get("protocol") != PROTOCOL:
        raise HandshakeRejected(f"the relay speaks protocol {str(challenge.get('protocol'))[:20]}, not {PROTOCOL}")
    nonces = (str(challenge.get("nonce"))[:_NONCE], os.urandom(_NONCE // 2).hex())
    proof = _proof(CLIENT, token, nonces, run)
    send(connection, FrameKind.HELLO, protocol=PROTOCOL, run=run, relay=relay, nonce=nonces[1], proof=proof)
    answer = receive(connection, deadline)
    if answer.kind is FrameKind.REFUSED:
        raise HandshakeRejected(str(answer.body.get("reason"))[:300])
    if not _proves(expect(answer, FrameKind.WELCOME).body.get("proof"), SERVER, token, nonces, run):
        raise ProtocolError("what answers does not know the token of this run: it is no relay of ours")


def expect(frame: Frame, kind: FrameKind) -> Frame:
    """`frame`, which must be a `kind`. Raises ProtocolError."""
    if frame.kind is not kind:
        raise ProtocolError(f"a {frame.kind.name} where a {kind.name} belongs")
    return frame


def tune(connection: socket.socket) -> None:
    """Send at once, and notice in the end that a machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def connect(address: str, run: str, token: str, relay: int, timeout_s: float, tls: Tls | None = None) -> socket.socket:
    """A connection to the relay at `address`, "host:port", that lets us in; over TLS where `tls` is given.

    Raises TransportError.
    """
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
    except (OSError, ValueError, OverflowError) as error:
        raise PeerGone(f"{address}: {error}") from error
    try:
        tune(connection)
        if tls is not None:
            connection = tls.dial(connection)
        introduce(connection, run, token, relay)
        connection.settimeout(timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


def _proof(who: str, token: str, nonces: tuple[str, str], run: str) -> str:
    """What only who knows the token can say, once: `nonces` are the server's and the client's."""
    said = json.dumps([PROTOCOL, who, *nonces, run]).encode()
    return hmac.new(token.encode(), said, "sha256").hexdigest()


def _proves(proof: object, who: str, token: str, nonces: tuple[str, str], run: str) -> bool:
    return hmac.compare_digest(str(proof).encode(), _proof(who, token, nonces, run).encode())
