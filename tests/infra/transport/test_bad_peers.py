"""Peers that send garbage, too much, nothing or damaged bytes; strangers; and a machine without room."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from relays_here import CHUNK, Machine, chain_over, machines, manifest_of, put, tell, until, weights

from infra.store import arriving
from infra.transport import handshake, peer, serving
from infra.transport.chunked_blob import full_blob
from infra.transport.frames import FrameKind, PeerGone, ProtocolError, receive, send
from infra.transport.handshake import HandshakeRejected, connect
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
        (HEADER.pack(b"LMN1", 6, 2, 1 << 62), ProtocolError, "bounds are"),
        (frame(99, {}), ProtocolError, "cannot be read"),
        (frame(5, b"{"), ProtocolError, "cannot be read"),
        (frame(5, []), ProtocolError, "is no object"),
        (frame(5, {}, 5), ProtocolError, "a WANT with a payload"),
        (frame(5, b"[" * 4000), ProtocolError, "cannot be read"),
        (b"LMN1", PeerGone, "silent"),
        (b"", PeerGone, "silent"),
    ],
)
def test_what_is_no_frame_is_an_error(data: bytes, error: type[Exception], message: str) -> None:
    with pair() as (ours, theirs):
        theirs.sendall(data)
        with pytest.raises(error, match=message):
            receive(ours)


def test_random_bytes_are_never_anything_but_an_error() -> None:
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
    [("r", "wrong", "the token is not that of this run"), ("other", "secret", "this relay serves run 'r'")],
)
def test_a_stranger_is_sent_away(run: str, token: str, reason: str) -> None:
    machine = Machine(0, token="secret")
    try:
        with pytest.raises(HandshakeRejected, match=reason):
            connect(machine.node.address, run, token, 1, 2.0)
        connect(machine.node.address, "r", "secret", 1, 2.0).close()
    finally:
        machine.close()


def test_a_relay_outlives_garbage_silence_and_senseless_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.2)
    data = weights(1)
    manifest = manifest_of("1.1", data)
    with machines(2) as relays:
        put(relays[0].store, manifest, data)
        host, _, port = relays[0].node.address.rpartition(":")
        silent = socket.create_connection((host, int(port)))
        for nonsense in (b"\0" * 5000, frame(2, {"protocol": 9}), frame(5, {}), HEADER.pack(b"LMN1", 6, 4000, 1 << 60)):
            with socket.create_connection((host, int(port)), timeout=5) as stranger:
                stranger.sendall(nonsense)
                with suppress(ConnectionResetError):
                    while stranger.recv(1000):  # until it closes
                        pass
        for question in (
            {},
            {"version": "1.1", "form": "full", "blake3": manifest.blake3, "start": -1, "length": 5},
            {"version": "1.1", "form": "full", "blake3": manifest.blake3, "start": 0, "length": 1 << 40},
            {"version": "1.1", "form": "full", "blake3": manifest.blake3, "start": len(data), "length": 5},
            {"version": [], "form": "full", "blake3": "", "start": 0, "length": 5},
        ):
            with connect(relays[0].node.address, "r", "", 1, 5.0) as friend:
                send(friend, FrameKind.WANT, **question)
                with pytest.raises(PeerGone):
                    receive(friend)
        with connect(relays[0].node.address, "r", "", 1, 5.0) as friend:
            send(friend, FrameKind.WANT, version="9.9", form="full", blake3="", start=0, length=5)
            assert receive(friend).kind is FrameKind.ABSENT
        tell(relays, manifest)
        until(lambda: relays[1].has("1.1"))
        with silent:
            silent.settimeout(5)
            while silent.recv(100):
                pass


def test_only_so_many_may_ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 3)
    with machines(1) as (relay,):
        friends = [connect(relay.node.address, "r", "", 1, 5.0) for _ in range(3)]
        with pytest.raises(HandshakeRejected, match="as many connections as it takes"):
            connect(relay.node.address, "r", "", 1, 5.0)
        friends[0].close()
        until(lambda: _may(relay))
        for friend in friends[1:]:
            friend.close()


def _may(relay: Machine) -> bool:
    try:
        connect(relay.node.address, "r", "", 1, 5.0).close()
    except HandshakeRejected:
        return False
    return True


@pytest.mark.parametrize(
    ("body", "payload"),
    [({"start": 0}, CHUNK + 1), ({"start": 0}, CHUNK - 1), ({"start": CHUNK}, CHUNK), ({"start": "0"}, CHUNK), ({}, 0)],
)
def test_a_source_that_sends_too_much_or_something_else_is_left(body: dict[str, object], payload: int) -> None:
    """Nothing of it is written anywhere."""
    cargo = full_blob(manifest_of("1.1", weights(5)))
    memory = memoryview(bytearray(cargo.bytes))
    with pair() as (ours, theirs):
        asking = peer.Peer(ours, cargo, memory, Link(), patient=False)
        asking.ask(0)
        theirs.sendall(frame(6, body, payload))
        with pytest.raises(ProtocolError, match="where a chunk was asked for"):
            asking.take()
    assert not any(memory)


class Meddler:
    """Stands between a relay and its source, and spoils the payload of some chunks on their way down."""

    def __init__(self, address: str, spoil: set[int]) -> None:
        self._address, self._spoil, self._chunks = address, spoil, 0
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._work, daemon=True).start()

    def close(self) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()

    def _work(self) -> None:
        while True:
            try:
                down, _ = self._door.accept()
            except OSError:
                return
            host, _, port = self._address.rpartition(":")
            up = socket.create_connection((host, int(port)))
            threading.Thread(target=self._upwards, args=(down, up), daemon=True).start()
            threading.Thread(target=self._downwards, args=(up, down), daemon=True).start()

    def _upwards(self, down: socket.socket, up: socket.socket) -> None:
        with up, down:
            try:
                while data := down.recv(4096):
                    up.sendall(data)
            except OSError:
                return

    def _downwards(self, up: socket.socket, down: socket.socket) -> None:
        try:
            with up, down, up.makefile("rb") as answers:
                while head := answers.read(HEADER.size):
                    _, kind, length, payload = HEADER.unpack(head)
                    rest = bytearray(answers.read(length + payload))
                    if kind == FrameKind.CHUNK:
                        if self._chunks in self._spoil:
                            rest[length + payload // 2] ^= 0x10
                        self._chunks += 1
                    down.sendall(head + rest)
        except OSError:
            return


@pytest.mark.parametrize("spoilt", [{0}, {3, 9}, {1, 2}, set(range(2, 40))])
def test_a_flipped_bit_is_detected_and_the_chunk_fetched_again(spoilt: set[int]) -> None:
    """At the third damaged chunk a relay leaves the source: it has another, or tries anew."""
    data = weights(2)
    manifest = manifest_of("1.1", data)
    with machines(2) as relays:
        put(relays[0].store, manifest, data)
        meddler = Meddler(relays[0].node.address, spoilt)
        first = RelayLink(0, meddler.address, "here", str(relays[0].store.root))
        relays[1].node.learn([manifest])
        relays[1].node.obey(chain_over([first, relays[1].link]))
        until(lambda: relays[1].has("1.1"))
        meddler.close()
        assert relays[1].bytes_of("1.1") == data.tobytes()
        count = relays[1].node.counts.corrupted
        assert count == len(spoilt) if len(spoilt) < 3 else count >= 3
        if count < 3:  # else what was under way when it left the source was in vain too
            assert relays[1].node.receiving.passed == len(data) + count * CHUNK


def test_without_room_nothing_is_fetched_and_it_is_fetched_once_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    data = weights(3)
    manifest = manifest_of("1.1", data)
    with machines(2) as relays:
        put(relays[0].store, manifest, data)
        with monkeypatch.context() as full:
            asked: list[int] = []
            full.setattr(arriving, "room", lambda folder: asked.append(1) or 1000)
            tell(relays, manifest)
            until(lambda: asked)
            assert not list(relays[1].store.root.glob("*.partial"))
            assert relays[1].node.receiving.passed == 0
        until(lambda: relays[1].has("1.1"))


def test_a_silent_source_is_left_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "SILENCE_S", 0.3)
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.3)
    data = weights(4)
    manifest = manifest_of("1.1", data)
    with machines(2) as relays, socket.create_server(("127.0.0.1", 0)) as dead:
        put(relays[0].store, manifest, data)
        silent = RelayLink(7, f"127.0.0.1:{dead.getsockname()[1]}", "elsewhere", "/s")
        relays[1].node.learn([manifest])
        relays[1].node.obey(chain_over([relays[0].link, silent, relays[1].link]))
        until(lambda: relays[1].has("1.1"))
        assert relays[1].node.counts.lost >= 1
