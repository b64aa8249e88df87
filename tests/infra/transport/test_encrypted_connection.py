"""EncryptedConnection: what was sent arrives in its order, or there is an error; without the keys nobody reads it."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag

from infra.transport import encrypted_connection
from infra.transport.encrypted_connection import SEGMENT_BYTES, EncryptedConnection, derive_secrets
from infra.transport.frames import FrameKind, PeerGone, ProtocolError, receive, receive_payload, send_chunk
from infra.transport.throttle import Link

NONCES = ("of-the-server", "of-the-client")
TAG = 16


class Ends:
    """A client whose segments are collected and may be changed before the server gets them."""

    def __init__(self) -> None:
        secrets = derive_secrets("token", NONCES, "run")
        ours, self.wire = socket.socketpair()
        self.inject, theirs = socket.socketpair()
        self.client = EncryptedConnection(ours, *secrets)
        self.server = EncryptedConnection(theirs, *reversed(secrets))
        for each in (ours, self.wire, self.inject, theirs):
            each.settimeout(10)

    def segment(self, data: bytes) -> bytes:
        """The segment in which the client sends `data`."""
        self.client.sendall(data)
        return self.wire.recv(1 << 20)

    def delivered(self, *segments: bytes) -> bytes:
        """What the server receives of `segments`, until the connection ends."""
        self.inject.sendall(b"".join(segments))
        self.inject.shutdown(socket.SHUT_WR)
        found, memory = b"", memoryview(bytearray(64))
        while count := self.server.recv_into(memory):
            found += bytes(memory[:count])
        return found


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    for each in (ends.client, ends.server, ends.wire, ends.inject):
        each.close()


@contextmanager
def connected() -> Iterator[tuple[EncryptedConnection, EncryptedConnection]]:
    secrets, pair = derive_secrets("token", NONCES, "run"), socket.socketpair()
    with EncryptedConnection(pair[0], *secrets) as client, EncryptedConnection(pair[1], *reversed(secrets)) as server:
        for each in pair:
            each.settimeout(20)
        yield client, server


@pytest.mark.parametrize("size", [1, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 3 * SEGMENT_BYTES + 7])
@pytest.mark.parametrize("rate", [None, 1e9])
def test_chunk_arrives_in_both_directions_as_it_was_sent(size: int, rate: float | None) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    with connected() as (client, server):
        for sender, receiver in ((client, server), (server, client), (client, server)):
            thread = threading.Thread(
                target=send_chunk, args=(sender, memoryview(data), Link()), kwargs={"start": 3}, daemon=True
            )
            thread.start()
            frame = receive(receiver)
            assert (frame.kind, frame.body, frame.payload) == (FrameKind.CHUNK, {"start": 3}, size)
            memory = memoryview(bytearray(size))
            receive_payload(receiver, memory, Link(rate))
            thread.join(20)
            assert bytes(memory) == data


def test_segments_hide_their_content_and_never_repeat(ends: Ends) -> None:
    first, second = (ends.segment(b"the same secret " * 4) for _ in range(2))
    assert b"secret" not in first + second
    assert first[4:] != second[4:]
    assert ends.delivered(first, second) == b"the same secret " * 8


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 20, -TAG, -1])
def test_segment_is_rejected_when_a_bit_is_changed(ends: Ends, place: int) -> None:
    segment = bytearray(ends.segment(b"x" * 40))
    segment[place] ^= 1
    with pytest.raises(ProtocolError, match="a segment"):
        ends.delivered(bytes(segment), bytes(1 << 16))


@pytest.mark.parametrize("order", [(1,), (0, 0), (1, 0), (0, 2)], ids=["dropped", "repeated", "swapped", "skipped"])
def test_segment_is_rejected_at_another_place(ends: Ends, order: tuple[int, ...]) -> None:
    segments = [ends.segment(bytes([number]) * 40) for number in range(3)]
    with pytest.raises(ProtocolError, match="not the one expected here"):
        ends.delivered(*(segments[number] for number in order))


def test_segment_is_rejected_when_it_is_sent_back(ends: Ends) -> None:
    ends.wire.sendall(ends.segment(b"x" * 40))
    with pytest.raises(ProtocolError, match="not the one expected here"):
        ends.client.recv_into(memoryview(bytearray(64)))


@pytest.mark.parametrize("length", [0, TAG, SEGMENT_BYTES + TAG + 1, (1 << 32) - 1])
def test_segment_is_rejected_for_its_length(ends: Ends, length: int) -> None:
    with pytest.raises(ProtocolError, match=f"a segment of {length} bytes"):
        ends.delivered(struct.pack("!I", length) + bytes(100))


def test_truncated_segments_deliver_nothing(ends: Ends) -> None:
    whole, cut = ends.segment(b"whole"), ends.segment(b"cut")
    assert ends.delivered(whole, cut[:-1]) == b"whole"
    with pytest.raises(PeerGone, match="closed"):
        receive(ends.server)


@pytest.mark.parametrize(
    "other", [("other", NONCES, "run"), ("token", NONCES[::-1], "run"), ("token", NONCES, "other")]
)
def test_secrets_depend_on_token_nonces_and_run(ends: Ends, other: tuple[str, tuple[str, str], str]) -> None:
    secrets = derive_secrets(*other)
    assert len({*secrets, *derive_secrets("token", NONCES, "run")}) == 4
    ends.server = EncryptedConnection(ends.server._connection, *reversed(secrets))
    with pytest.raises(ProtocolError, match="not the one expected here"):
        ends.delivered(ends.segment(b"x" * 40))


def test_key_is_replaced_after_a_number_of_segments(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encrypted_connection, "SEGMENTS_PER_KEY", 3)
    first_key, _ = encrypted_connection._Direction(derive_secrets("token", NONCES, "run").of_client).next_segment()
    segments = [ends.segment(bytes([number]) * 40) for number in range(7)]
    readable = []
    for number, segment in enumerate(segments):
        try:
            first_key.decrypt(number.to_bytes(12, "big"), segment[4:], segment[:4])
            readable.append(number)
        except InvalidTag:
            pass
    assert readable == [0, 1, 2]
    assert ends.delivered(*segments) == b"".join(bytes([number]) * 40 for number in range(7))


def test_segments_of_several_threads_have_different_nonces() -> None:
    with connected() as (client, server):
        threads = [threading.Thread(target=client.sendall, args=(bytes([n]) * 5000,), daemon=True) for n in range(8)]
        for thread in threads:
            thread.start()
        memory, found = memoryview(bytearray(5000)), []
        for _ in threads:  # the same nonce twice would be another segment than expected
            assert server.recv_into(memory) == 5000
            found.append(memory[0])
        assert sorted(found) == list(range(8))
