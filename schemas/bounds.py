"""Whether a record fits the size bound, computed before it is encoded."""

from __future__ import annotations

from schemas.codec import MAX_VALUE_BYTES
from schemas.records import KVManifest, Prompt

_TOKEN_BYTES = 9  # id, logprob and one bit of the mask
_SPAN_BYTES = 32
_CHECKSUM_BYTES = 8
_OVERHEAD = 64 * 1024


def fits_inbox(prompt: Prompt, tokens: int, spans: int = 0, kv: KVManifest | None = None) -> bool:
    """Whether an assignment of `prompt` fits in one record.

    Its partial response has `tokens` tokens in `spans` version spans; `kv` is its KV manifest.
    """
    text = _max_bytes(prompt.text) + _max_bytes(prompt.reference)
    checksums = 0 if kv is None else _CHECKSUM_BYTES * len(kv.chunk_checksums)
    partial = _TOKEN_BYTES * tokens + _SPAN_BYTES * spans
    return text + 4 * len(prompt.token_ids) + partial + checksums + _OVERHEAD <= MAX_VALUE_BYTES


def _max_bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)
