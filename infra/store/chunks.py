"""Chunks of a version and their CRC-32C checksums, which are verified in transfers between machines."""

from __future__ import annotations

from crc32c import crc32c

MAX_CHUNK_BYTES = 64 << 20
MAX_CHUNKS = 16_384
"""Maximum of chunks in a manifest, unless they would be longer than `MAX_CHUNK_BYTES`."""
DEFAULT_CHUNK_BYTES = 8 << 20


def chunk_checksums(data: memoryview, chunk_bytes: int) -> tuple[int, ...]:
    """The CRC-32C of each chunk of `data`."""
    return tuple(crc32c(data[start : start + chunk_bytes]) for start in range(0, len(data), chunk_bytes))


def chunk_size(size: int, wanted: int = DEFAULT_CHUNK_BYTES) -> int:
    """Bytes per chunk for a version of `size` bytes: `wanted`, doubled until there are at most `MAX_CHUNKS`."""
    while -(-size // wanted) > MAX_CHUNKS and wanted < MAX_CHUNK_BYTES:
        wanted *= 2
    return min(wanted, MAX_CHUNK_BYTES)
