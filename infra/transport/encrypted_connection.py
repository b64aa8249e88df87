"""EncryptedConnection: bulk data after a TLS handshake, in segments larger than TLS's records.

A TLS record has at most 16 KB, and reading each costs more than decrypting it. So TLS authenticates two relays and
agrees on secrets, and ends; the bytes that follow are segments of up to 512 KB:

    u32 length of the rest (big endian), AES-256-GCM ciphertext, 16-byte tag

Each direction has its own keys. The nonce is the number of the segment, and the length is authenticated, so a segment
that was changed, dropped, repeated, moved or sent back is rejected. Nothing follows from the end of a connection: it is
the same failure for a frame that is incomplete, whoever caused it.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from infra.closing import ClosedAtExit
from infra.transport.frames import ProtocolError

SEGMENT_BYTES = 512 << 10
"""Maximum of plain bytes in a segment: few calls for each megabyte, and it stays in a core's cache."""
SEGMENTS_PER_KEY = 1 << 16
"""After so many segments, at most 32 GiB, a direction uses its next key; AES-GCM's limit is ten times that."""
_HEADER = struct.Struct("!I")
_TAG_BYTES = 16
_KEY_BYTES = 32


class Secrets(NamedTuple):
    """The secrets from which the keys of the two directions are derived."""

    of_client: bytes
    of_server: bytes


def derive_secrets(token: str, nonces: tuple[str, str], run: str) -> Secrets:
    """The secrets of a connection (HKDF, RFC 5869) from the nonces that the two ends exchanged over TLS.

    The run's token is needed, too: a relay's certificate alone does not suffice to sit between two relays.
    """
    shared = json.dumps([*nonces, run]).encode()
    made = HKDF(SHA256(), 2 * _KEY_BYTES, salt=token.encode(), info=b"laminar segments").derive(shared)
    return Secrets(made[:_KEY_BYTES], made[_KEY_BYTES:])


class EncryptedConnection(ClosedAtExit):
    """Sends with `sending` and receives with `receiving`, secrets of two directions, over `connection`."""

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes) -> None:
        self._connection = connection
        self._sending, self._receiving = _Direction(sending), _Direction(receiving)
        self._send_lock = threading.Lock()  # two segments must never have the same nonce
        self._out, self._in = (memoryview(bytearray(_HEADER.size + SEGMENT_BYTES + _TAG_BYTES)) for _ in range(2))
        self._unread = memoryview(b"")

    def sendall(self, data: bytes | bytearray | memoryview, /) -> None:
        """Send `data`. Raises OSError."""
        plain = memoryview(data).cast("B")
        with self._send_lock:
            for start in range(0, len(plain), SEGMENT_BYTES):
                part = plain[start : start + SEGMENT_BYTES]
                end = _HEADER.size + len(part) + _TAG_BYTES
                _HEADER.pack_into(self._out, 0, end - _HEADER.size)
                key, nonce = self._sending.next_segment()
                key.encrypt_into(nonce, part, self._out[: _HEADER.size], self._out[_HEADER.size : end])
                self._connection.sendall(self._out[:end])

    def recv_into(self, memory: memoryview, /) -> int:
        """Receive into the beginning of `memory`, and return how many bytes; 0 at the end of the connection.

        Raises OSError, and ProtocolError for a segment that the other end did not send, or not at this place; `memory`
        then has undefined content.
        """
        if not self._unread:
            return self._receive_segment(memory)
        count = min(len(memory), len(self._unread))
        memory[:count] = self._unread[:count]
        self._unread = self._unread[count:]
        return count

    def settimeout(self, seconds: float | None, /) -> None:
        """Set the maximum time without progress."""
        self._connection.settimeout(seconds)

    def shutdown(self, how: int, /) -> None:
        """Shut the socket down. Raises OSError."""
        self._connection.shutdown(how)

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()

    def _receive_segment(self, memory: memoryview) -> int:
        header = self._in[: _HEADER.size]
        if not self._fill(header):
            return 0
        (length,) = _HEADER.unpack(header)
        if not _TAG_BYTES < length <= SEGMENT_BYTES + _TAG_BYTES:
            limits = f"{_TAG_BYTES + 1} to {SEGMENT_BYTES + _TAG_BYTES}"
            raise ProtocolError(f"a segment of {length} bytes, it must have {limits}")
        encrypted = self._in[_HEADER.size : _HEADER.size + length]
        if not self._fill(encrypted):
            return 0
        size = length - _TAG_BYTES
        fits = size <= len(memory)
        plain = memory[:size] if fits else memoryview(bytearray(size))
        key, nonce = self._receiving.next_segment()
        try:
            key.decrypt_into(nonce, encrypted, header, plain)
        except InvalidTag as error:
            raise ProtocolError("a segment was changed on its way, or is not the one expected here") from error
        if fits:
            return size
        self._unread = plain
        return self.recv_into(memory)

    def _fill(self, memory: memoryview) -> bool:
        """Fill `memory` from the socket; False if it ends before."""
        while memory:
            count = self._connection.recv_into(memory)
            if not count:
                return False
            memory = memory[count:]
        return True


class _Direction:
    """The keys of one direction and the number of its next segment."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._next = secret, 0
        self._key = self._derive_key()

    def next_segment(self) -> tuple[AESGCM, bytes]:
        """The key and the nonce of the next segment; a nonce is never used again."""
        number, self._next = self._next, self._next + 1
        if number and number % SEGMENTS_PER_KEY == 0:
            self._key = self._derive_key()
        return self._key, number.to_bytes(12, "big")

    def _derive_key(self) -> AESGCM:
        generation = (self._next // SEGMENTS_PER_KEY).to_bytes(8, "big")
        return AESGCM(HKDFExpand(SHA256(), _KEY_BYTES, info=b"key" + generation).derive(self._secret))
