"""The unit of transfer: the bytes of a weight version, of its delta, or of KV, split into chunks with checksums.

Each chunk has a CRC-32C, which detects and locates transmission errors; a version has a BLAKE3, which is authoritative.
CRC-32C costs a tenth of BLAKE3, so each chunk is verified before it is forwarded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from infra.store.chunks import MAX_CHUNK_BYTES
from schemas.records import PolicyVersion, WeightVersion

BlobForm = Literal["full", "delta", "kv"]
FORMS = get_args(BlobForm)


@dataclass(frozen=True)
class ChunkedBlob:
    """`bytes` bytes of version `version` in chunks of `chunk_bytes`, the last one shorter.

    `checks` has the CRC-32C of each chunk. `blake3` is the hash of the whole version, also for a delta, and identifies
    the contents; for KV it is the name of the offer. Raises ValueError for inconsistent sizes.
    """

    version: PolicyVersion
    form: BlobForm
    blake3: str
    bytes: int
    chunk_bytes: int
    checks: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.bytes < 1:
            raise ValueError(f"version {self.version} is declared with {self.bytes} bytes, it must be at least 1")
        if not 1 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(
                f"version {self.version} is declared with chunks of {self.chunk_bytes} bytes, "
                f"it must be 1 to {MAX_CHUNK_BYTES}"
            )
        expected = -(-self.bytes // self.chunk_bytes)
        if len(self.checks) != expected:
            raise ValueError(f"version {self.version} is declared with {len(self.checks)} chunks, not {expected}")

    @property
    def key(self) -> tuple[str, str, str]:
        """Identifies the blob: version, form and hash."""
        return str(self.version), self.form, self.blake3

    @property
    def chunks(self) -> int:
        return len(self.checks)

    def span(self, chunk: int) -> slice:
        """The byte range of chunk `chunk`."""
        start = chunk * self.chunk_bytes
        return slice(start, min(start + self.chunk_bytes, self.bytes))


def full_blob(manifest: WeightVersion) -> ChunkedBlob:
    """The complete version that `manifest` describes. Raises ValueError for an inconsistent manifest."""
    return ChunkedBlob(
        manifest.version, "full", manifest.blake3, manifest.bytes, manifest.chunk_bytes, tuple(manifest.chunk_checksums)
    )


def delta_blob(manifest: WeightVersion) -> ChunkedBlob | None:
    """The delta that `manifest` describes, None if it has none. Raises ValueError for an inconsistent manifest."""
    delta = manifest.delta
    if delta is None:
        return None
    return ChunkedBlob(
        manifest.version, "delta", manifest.blake3, delta.bytes, manifest.chunk_bytes, tuple(delta.chunk_checksums)
    )
