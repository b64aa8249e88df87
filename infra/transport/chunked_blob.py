"""What is moved: the bytes of a version, or of its delta, cut into chunks that are checked one by one.

A chunk's check is its CRC-32C, which finds every accident on the way and says where; a version's check is its BLAKE3,
which decides. The first costs a tenth of the second, so that every chunk can be checked before it is passed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from infra.store.chunks import MAX_CHUNK_BYTES
from schemas.records import PolicyVersion, WeightVersion

Form = Literal["full", "delta", "kv"]
FORMS = get_args(Form)


@dataclass(frozen=True)
class ChunkedBlob:
    """`bytes` bytes of version `version` in chunks of `chunk_bytes`, the last one shorter; `checks` has one a chunk.

    `blake3` is that of the whole version, for a delta too: it names the contents. KV under that version has a name of
    its own there. Raises ValueError for what cannot be.
    """

    version: PolicyVersion
    form: Form
    blake3: str
    bytes: int
    chunk_bytes: int
    checks: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.bytes < 1:
            raise ValueError(f"version {self.version} is said to have {self.bytes} bytes")
        if not 1 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(
                f"version {self.version} is said to have chunks of {self.chunk_bytes} bytes, at most {MAX_CHUNK_BYTES}"
            )
        expected = -(-self.bytes // self.chunk_bytes)
        if len(self.checks) != expected:
            raise ValueError(f"version {self.version} is said to have {len(self.checks)} chunks, it must be {expected}")

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from any other cargo."""
        return str(self.version), self.form, self.blake3

    @property
    def chunks(self) -> int:
        return len(self.checks)

    def span(self, chunk: int) -> slice:
        """Where chunk `chunk` lies."""
        start = chunk * self.chunk_bytes
        return slice(start, min(start + self.chunk_bytes, self.bytes))


def full_blob(manifest: WeightVersion) -> ChunkedBlob:
    """The whole version that `manifest` describes. Raises ValueError for one that cannot be."""
    return ChunkedBlob(
        manifest.version, "full", manifest.blake3, manifest.bytes, manifest.chunk_bytes, tuple(manifest.chunks)
    )


def delta_blob(manifest: WeightVersion) -> ChunkedBlob | None:
    """The delta that `manifest` describes, None if it has none. Raises ValueError for one that cannot be."""
    delta = manifest.delta
    if delta is None:
        return None
    return ChunkedBlob(
        manifest.version, "delta", manifest.blake3, delta.bytes, manifest.chunk_bytes, tuple(delta.chunks)
    )


def missing_of(have: Sequence[bool]) -> list[int]:
    """The chunks that are not there."""
    return [chunk for chunk, there in enumerate(have) if not there]
