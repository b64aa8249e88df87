"""Rewards for the length of a response in tokens."""

from __future__ import annotations


def brevity(tokens: int, target: int, limit: int) -> float:
    """1 up to `target` tokens, 0 from `limit` on, linear between."""
    if tokens <= target:
        return 1.0
    return max(0.0, (limit - tokens) / (limit - target))


def soft_overlong(tokens: int, limit: int, buffer: int) -> float:
    """0 up to `limit - buffer` tokens, then linear to -1 at `limit`, and -1 beyond (DAPO, arXiv 2503.14476, eq. 13)."""
    return max(-1.0, min(0.0, (limit - buffer - tokens) / buffer))
