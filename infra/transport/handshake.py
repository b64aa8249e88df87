"""The handshake of two peers: TLS if configured, the protocol version, the run, and mutual proof of the run's token.

The token is never sent. It protects against peers that cannot read or change the traffic between two relays; TLS
protects against those that can. The nonces sent over TLS and the token give the keys of what follows the handshake.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import ssl
import time
from collections.abc import Callable

from infra.files import MIN_SECRET_CHARACTERS
from infra.system import SYSTEM, System
from infra.transport.connection import Connection
from infra.transport.frames import Frame, FrameKind, PeerUnreachable, ProtocolError, TransportError, receive, send
from infra.transport.tls import Tls, end_tls, tls_handshake
from schemas.release import FIRST, written_release

PROTOCOL = 4
"""The newest version of the protocol."""
UNPROTECTED = 3
"""That of release 0.2.0: TLS stays for the whole connection."""
PROTOCOLS = {FIRST: UNPROTECTED}
"""The version by the run's release, the newest for all others: a server chooses it, its clients follow."""
HANDSHAKE_S = 5.0
"""Time limit of the whole handshake, TLS included."""
SERVER, CLIENT = "server", "client"
_NONCE = 64


class HandshakeRejected(TransportError):
    """The other end rejected this one: another protocol, run or token, or too many connections."""


def accept_peer(
    connection: Connection,
    run: str,
    token: str,
    *,
    admit: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] = time.monotonic,
) -> Connection:
    """Authenticate a peer and return the connection to use from now on.

    `admit` is called once the peer has proved the token, and returns whether another connection is accepted. Raises
    HandshakeRejected, ProtocolError, PeerGone.
    """
    deadline = clock() + HANDSHAKE_S
    tls_handshake(connection, HANDSHAKE_S)
    nonce = os.urandom(_NONCE // 2).hex()
    connection.settimeout(max(0.001, deadline - clock()))
    protocol = PROTOCOLS.get(written_release(), PROTOCOL)
    send(connection, FrameKind.CHALLENGE, protocol=protocol, nonce=nonce)
    hello = expect(receive(connection, deadline, clock), FrameKind.HELLO).body
    nonces = (nonce, str(hello.get("nonce"))[:_NONCE])
    reason = ""
    if hello.get("protocol") != protocol:
        reason = f"this relay uses protocol {protocol}, not {str(hello.get('protocol'))[:20]}"
    elif hello.get("run") != run:
        reason = f"this relay serves run {run!r}, not {str(hello.get('run'))[:100]!r}"
    elif not _proves(hello.get("proof"), protocol, CLIENT, token, nonces, run):
        reason = "the token is not that of this run"
    elif not admit():
        reason = "this relay has reached its limit of connections"
    if reason:
        send(connection, FrameKind.REFUSED, reason=reason)
        raise HandshakeRejected(reason)
    send(connection, FrameKind.WELCOME, proof=_proof(protocol, SERVER, token, nonces, run))
    protected = connection
    if protocol != UNPROTECTED:
        protected = _protect(connection, SERVER, token, nonces, run, deadline, clock)
    protected.settimeout(None)
    return protected


def authenticate(
    connection: Connection, run: str, token: str, relay: int, clock: Callable[[], float] = time.monotonic
) -> Connection:
    """Authenticate to the other end, which proves the token, too, and return the connection to use from now on.

    Raises HandshakeRejected, ProtocolError, PeerGone.
    """
    if problem := token_problem(token):  # a relay without a token would be a stranger's
        raise HandshakeRejected(problem)
    deadline = clock() + HANDSHAKE_S
    tls_handshake(connection, HANDSHAKE_S)
    challenge = expect(receive(connection, deadline, clock), FrameKind.CHALLENGE).body
    protocol = challenge.get("protocol")
    if protocol not in (PROTOCOL, UNPROTECTED):
        raise HandshakeRejected(f"the relay uses protocol {str(protocol)[:20]}, not {PROTOCOL}")
    nonces = (str(challenge.get("nonce"))[:_NONCE], os.urandom(_NONCE // 2).hex())
    proof = _proof(protocol, CLIENT, token, nonces, run)
    send(connection, FrameKind.HELLO, protocol=protocol, run=run, relay=relay, nonce=nonces[1], proof=proof)
    reply = receive(connection, deadline, clock)
    if reply.kind is FrameKind.REFUSED:
        raise HandshakeRejected(str(reply.body.get("reason"))[:300])
    if not _proves(expect(reply, FrameKind.WELCOME).body.get("proof"), protocol, SERVER, token, nonces, run):
        raise ProtocolError("the peer does not know the token of this run: it is not a relay of this run")
    if protocol == UNPROTECTED:
        return connection
    return _protect(connection, CLIENT, token, nonces, run, deadline, clock)


def token_problem(token: str) -> str | None:
    """Why no relay works with `token`; None if it does."""
    if len(token) >= MIN_SECRET_CHARACTERS:
        return None
    return (
        f"relays need a token of at least {MIN_SECRET_CHARACTERS} characters, not {len(token)}: that of "
        "relay.token_file, or relay.secret in the run's folder"
    )


def expect(frame: Frame, kind: FrameKind) -> Frame:
    """Return `frame`, which must be a `kind`. Raises ProtocolError."""
    if frame.kind is not kind:
        raise ProtocolError(f"the peer sent a {frame.kind.name} frame, expected a {kind.name} frame")
    return frame


def set_socket_options(connection: Connection) -> None:
    """Disable Nagle's algorithm of a socket, and enable keep-alive to detect a machine that is gone."""
    if not isinstance(connection, socket.socket):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def connect(
    address: str,
    run: str,
    token: str,
    relay: int,
    timeout_s: float,
    tls: Tls | None = None,
    system: System = SYSTEM,
) -> Connection:
    """Open an authenticated connection to the relay at `address`, "host:port"; encrypted if `tls` is given.

    Raises TransportError.
    """
    host, _, port = address.rpartition(":")
    try:
        connection = system.connect(host.strip("[]"), int(port), timeout_s)
    except (OSError, ValueError, OverflowError) as error:
        raise PeerUnreachable(f"{address}: {error}") from error
    try:
        set_socket_options(connection)
        if tls is not None:
            connection = tls.wrap_client(connection)
        authenticated = authenticate(connection, run, token, relay, system.monotonic)
        authenticated.settimeout(timeout_s)
    except BaseException:
        connection.close()
        raise
    return authenticated


def _protect(
    connection: Connection,
    end: str,
    token: str,
    nonces: tuple[str, str],
    run: str,
    deadline: float,
    clock: Callable[[], float],
) -> Connection:
    """Replace TLS, if there is TLS, by an EncryptedConnection with keys of this handshake."""
    if not isinstance(connection, ssl.SSLSocket):
        return connection
    from infra.transport.encrypted_connection import EncryptedConnection, derive_secrets

    connection.settimeout(max(0.001, deadline - clock()))
    end_tls(connection)
    of_client, of_server = derive_secrets(token, nonces, run)
    keys = (of_client, of_server) if end == CLIENT else (of_server, of_client)
    return EncryptedConnection(connection, *keys)


def _proof(protocol: int, who: str, token: str, nonces: tuple[str, str], run: str) -> str:
    """The HMAC that proves the token; `nonces` are the server's and the client's, so it is valid once."""
    message = json.dumps([protocol, who, *nonces, run]).encode()
    return hmac.new(token.encode(), message, "sha256").hexdigest()


def _proves(proof: object, protocol: int, who: str, token: str, nonces: tuple[str, str], run: str) -> bool:
    given = str(proof).encode(errors="replace")  # JSON may have half a surrogate pair
    return hmac.compare_digest(given, _proof(protocol, who, token, nonces, run).encode())
