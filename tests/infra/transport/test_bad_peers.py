"""Relays and faulty peers: invalid, oversized, missing or corrupted data, unauthenticated clients, and full memory."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from relays_here import (
    CHUNK,
    TOKEN,
    Machine,
    chain_over,
    configure,
    machines,
    manifest_of,
    store_version,
    until,
    weights,
)

from infra.store import incoming_version
from infra.transport import handshake, peer, serving
from infra.transport.chunked_blob import full_blob
from infra.transport.endpoint import Endpoint
from infra.transport.frames import FrameKind, PeerGone, ProtocolError, receive, send
from infra.transport.handshake import HandshakeRejected, connect
from infra.transport.kv_transfer import KVTransfers
from infra.transport.throttle import Link
from schemas.records import RelayLink

HEADER = struct.Struct("!4sBIQ")


def frame(kind: int, body: object, payload: int = 0, magic: bytes = b"LMN1") -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HEADER.pack(magic, kind, len(text), payload) + text


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.2)
        yield ours, theirs


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", ProtocolError, "not a relay's frame"),
        (HEADER.pack(b"LMN1", 5, 1 << 31, 0), ProtocolError, "a frame of 2147483648"),
        (HEADER.pack(b"LMN1", 6, 2, 1 << 62), ProtocolError, "the limits are"),
        (frame(99, {}), ProtocolError, "cannot be decoded"),
        (frame(5, b"{"), ProtocolError, "cannot be decoded"),
        (frame(5, []), ProtocolError, "is not a JSON object"),
        (frame(5, {}, 5), ProtocolError, "a REQUEST frame has a payload of 5 bytes"),
        (frame(5, b"[" * 4000), ProtocolError, "cannot be decoded"),
        (b"LMN1", PeerGone, "sent nothing"),
        (b"", PeerGone, "sent nothing"),
    ],
)
def test_receive_raises_for_invalid_frames(data: bytes, error: type[Exception], message: str) -> None:
    with pair() as (ours, theirs):
        theirs.sendall(data)
        with pytest.raises(error, match=message):
            receive(ours)


def test_receive_raises_only_transport_errors_for_random_bytes() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        with pair() as (ours, theirs):
            data = bytearray(frame(int(random.integers(1, 10)), {"version": "1.1", "start": 0}))
            for place in random.integers(0, len(data), 3):
                data[place] ^= int(random.integers(1, 256))
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            with suppress(ProtocolError, PeerGone):
                receive(ours)


@pytest.mark.parametrize(
    ("run", "token", "reason"),
    [
        ("r", "another-token-entirely", "the token is not that of this run"),
        ("other", TOKEN, "this relay serves run 'r'"),
    ],
)
def test_connect_is_rejected_for_a_wrong_token_or_run(run: str, token: str, reason: str) -> None:
    machine = Machine(0)
    try:
        with pytest.raises(HandshakeRejected, match=reason):
            connect(machine.node.address, run, token, 1, 2.0)
        connect(machine.node.address, "r", TOKEN, 1, 2.0).close()
    finally:
        machine.close()


@pytest.mark.parametrize("key", ["", "another-token-entirely"])
def test_relay_rejects_a_client_that_has_only_its_run(key: str) -> None:
    """As any local user does: the name of a run is that of its folder and its topics."""
    with machines(1) as (relay,):
        host, _, port = relay.node.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as client:
            nonces = (str(receive(client).body["nonce"]), "mine")
            proof = handshake._proof(handshake.PROTOCOL, handshake.CLIENT, key, nonces, "r")
            send(client, FrameKind.HELLO, protocol=handshake.PROTOCOL, run="r", relay=1, nonce="mine", proof=proof)
            assert receive(client).body["reason"] == "the token is not that of this run"
            with pytest.raises(PeerGone):
                receive(client)


@pytest.mark.parametrize("token", ["", "fifteen-letters"])
def test_relays_do_not_work_without_a_token(token: str) -> None:
    with pytest.raises(ValueError, match=f"relays need a token of at least 16 characters, not {len(token)}"):
        KVTransfers("r", Endpoint(token=token), 1000)
    with machines(1) as (relay,), pytest.raises(HandshakeRejected, match="relays need a token"):
        connect(relay.node.address, "r", token, 1, 2.0)


def test_handshake_rejects_a_proof_that_cannot_be_encoded() -> None:
    body = {"protocol": handshake.PROTOCOL, "run": "r", "nonce": "", "proof": "\ud800"}
    with pair() as (ours, theirs):
        theirs.sendall(frame(FrameKind.HELLO, body))
        with pytest.raises(HandshakeRejected, match="the token is not that of this run"):
            handshake.accept_peer(ours, "r", TOKEN)
    with pair() as (ours, theirs):
        theirs.sendall(frame(FrameKind.CHALLENGE, body) + frame(FrameKind.WELCOME, body))
        with pytest.raises(ProtocolError, match="does not know the token"):
            handshake.authenticate(ours, "r", TOKEN, 0)


def test_relay_survives_garbage_and_invalid_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    data = weights(1)
    manifest = manifest_of("1.1", data)
    with machines(2) as relays:
        store_version(relays[0].store, manifest, data)
        host, _, port = relays[0].node.address.rpartition(":")
        with monkeypatch.context() as short:
            short.setattr(handshake, "HANDSHAKE_S", 2.0)
            silent = socket.create_connection((host, int(port)))
            receive(silent)  # its handshake has begun
        for garbage in (b"\0" * 5000, frame(2, {"protocol": 9}), frame(5, {}), HEADER.pack(b"LMN1", 6, 4000, 1 << 60)):
            with socket.create_connection((host, int(port)), timeout=5) as client:
                client.sendall(garbage)
                with suppress(ConnectionResetError):
                    while client.recv(1000):  # until it closes
                        pass
        for request in (
            {},
            {"version": "1.1", "form": "full", "blake3": manifest.blake3, "start": -1, "length": 5},
            {"version": "1.1", "form": "full", "blake3": manifest.blake3, "start": 0, "length": 1 << 40},
            {"version": "1.1", "form": "full", "blake3": manifest.blake3, "start": len(data), "length": 5},
            {"version": [], "form": "full", "blake3": "", "start": 0, "length": 5},
        ):
            with connect(relays[0].node.address, "r", TOKEN, 1, 5.0) as client:
                send(client, FrameKind.REQUEST, **request)
                with pytest.raises(PeerGone):
                    receive(client)
        with connect(relays[0].node.address, "r", TOKEN, 1, 5.0) as client:
            send(client, FrameKind.REQUEST, version="9.9", form="full", blake3="", start=0, length=5)
            assert receive(client).kind is FrameKind.ABSENT
        configure(relays, manifest)
        until(lambda: relays[1].has("1.1"))
        with silent:
            silent.settimeout(60)
            while silent.recv(100):
                pass


def test_relay_accepts_again_after_a_failed_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files, for example: the relay must not stop for ever."""
    accept, failing = socket.socket.accept, [OSError(24, "Too many open files")]

    def accept_after_an_error(listening: socket.socket) -> tuple[socket.socket, object]:
        accepted = accept(listening)
        if failing:
            accepted[0].close()
            raise failing.pop()
        return accepted

    monkeypatch.setattr(socket.socket, "accept", accept_after_an_error)
    with machines(1) as (relay,):
        with pytest.raises(PeerGone):
            connect(relay.node.address, "r", TOKEN, 1, 5.0)
        connect(relay.node.address, "r", TOKEN, 1, 5.0).close()


def test_relay_limits_authenticated_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 3)
    with machines(1) as (relay,):
        clients = [connect(relay.node.address, "r", TOKEN, 1, 5.0) for _ in range(3)]
        with pytest.raises(HandshakeRejected, match="has reached its limit of connections"):
            connect(relay.node.address, "r", TOKEN, 1, 5.0)
        clients[0].close()
        until(lambda: _can_connect(relay))
        for client in clients[1:]:
            client.close()


def _can_connect(relay: Machine) -> bool:
    try:
        connect(relay.node.address, "r", TOKEN, 1, 5.0).close()
    except HandshakeRejected:
        return False
    return True


@pytest.mark.parametrize(
    ("body", "payload"),
    [({"start": 0}, CHUNK + 1), ({"start": 0}, CHUNK - 1), ({"start": CHUNK}, CHUNK), ({"start": "0"}, CHUNK), ({}, 0)],
)
def test_peer_raises_for_an_unexpected_response(body: dict[str, object], payload: int) -> None:
    """Nothing of the invalid response is written to memory."""
    blob = full_blob(manifest_of("1.1", weights(5)))
    memory = memoryview(bytearray(blob.bytes))
    with pair() as (ours, theirs):
        client_peer = peer.Peer(ours, blob, memory, Link(), may_wait=False)
        client_peer.request(0)
        theirs.sendall(frame(6, body, payload))
        with pytest.raises(ProtocolError, match="in response to a request of chunk 0"):
            client_peer.receive_chunk()
    assert not any(memory)


class CorruptingProxy:
    """A proxy between a relay and its source that flips a bit in the payload of some chunks."""

    def __init__(self, address: str, corrupt_chunks: set[int]) -> None:
        self._address, self._corrupt_chunks, self._chunks = address, corrupt_chunks, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._work, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _work(self) -> None:
        while True:
            try:
                down, _ = self._listener.accept()
            except OSError:
                return
            host, _, port = self._address.rpartition(":")
            up = socket.create_connection((host, int(port)))
            threading.Thread(target=self._forward_requests, args=(down, up), daemon=True).start()
            threading.Thread(target=self._forward_responses, args=(up, down), daemon=True).start()

    def _forward_requests(self, down: socket.socket, up: socket.socket) -> None:
        with up, down:
            try:
                while data := down.recv(4096):
                    up.sendall(data)
            except OSError:
                return

    def _forward_responses(self, up: socket.socket, down: socket.socket) -> None:
        try:
            with up, down, up.makefile("rb") as responses:
                while head := responses.read(HEADER.size):
                    _, kind, length, payload = HEADER.unpack(head)
                    rest = bytearray(responses.read(length + payload))
                    if kind == FrameKind.CHUNK:
                        if self._chunks in self._corrupt_chunks:
                            rest[length + payload // 2] ^= 0x10
                        self._chunks += 1
                    down.sendall(head + rest)
        except OSError:
            return


@pytest.mark.parametrize("corrupted", [{0}, {3, 9}, {1, 2}, set(range(2, 40))])
def test_relay_requests_corrupted_chunks_again(corrupted: set[int]) -> None:
    """After the third corrupted chunk a relay abandons the source and uses another, or retries."""
    data = weights(2)
    manifest = manifest_of("1.1", data)
    with machines(2) as relays:
        store_version(relays[0].store, manifest, data)
        proxy = CorruptingProxy(relays[0].node.address, corrupted)
        first = RelayLink(0, proxy.address, "here", str(relays[0].store.root))
        relays[1].node.set_manifests([manifest])
        relays[1].node.set_chain(chain_over([first, relays[1].link]))
        until(lambda: relays[1].has("1.1"))
        proxy.close()
        assert relays[1].bytes_of("1.1") == data.tobytes()
        count = relays[1].node.counts.corrupted
        assert count == len(corrupted) if len(corrupted) < 3 else count >= 3
        if count < 3:  # otherwise chunks in flight were lost with the source, too
            assert relays[1].node.receiving.bytes_passed == len(data) + count * CHUNK


def test_relay_fetches_only_once_there_is_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    data = weights(3)
    manifest = manifest_of("1.1", data)
    with machines(2) as relays:
        store_version(relays[0].store, manifest, data)
        with monkeypatch.context() as full:
            calls: list[int] = []
            full.setattr(incoming_version, "free_bytes", lambda folder: calls.append(1) or 1000)
            configure(relays, manifest)
            until(lambda: calls)
            assert not list(relays[1].store.root.glob("*.partial"))
            assert relays[1].node.receiving.bytes_passed == 0
        until(lambda: relays[1].has("1.1"))


def test_relay_replaces_a_source_that_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "RESPONSE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.3)
    data = weights(4)
    manifest = manifest_of("1.1", data)
    with machines(2) as relays, socket.create_server(("127.0.0.1", 0)) as dead:
        store_version(relays[0].store, manifest, data)
        silent = RelayLink(7, f"127.0.0.1:{dead.getsockname()[1]}", "elsewhere", "/s")
        relays[1].node.set_manifests([manifest])
        relays[1].node.set_chain(chain_over([relays[0].link, silent, relays[1].link]))
        until(lambda: relays[1].has("1.1"))
        assert relays[1].node.counts.lost >= 1
