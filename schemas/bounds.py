"""Whether a record fits the size bound, computed before it is encoded."""

from __future__ import annotations

from schemas.codec import MAX_VALUE_BYTES
from schemas.records import Prompt

_TOKEN_BYTES = 9  # id, logprob and one bit of the mask
_OVERHEAD = 64 * 1024


def fits_inbox(prompt: Prompt, tokens: int) -> bool:
    """Whether an assignment of `prompt` with a partial response of `tokens` tokens fits in one record."""
    text = _max_bytes(prompt.text) + _max_bytes(prompt.reference)
    return text + 4 * len(prompt.token_ids) + _TOKEN_BYTES * tokens + _OVERHEAD <= MAX_VALUE_BYTES


def _max_bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)
