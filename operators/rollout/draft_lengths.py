"""The length of the drafts of a pass: the one with the most expected tokens per second, 0 included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LENGTHS = np.array([1, 2, 3, 4, 6, 8, 12, 16])
"""Draft lengths to choose from."""
MOST_ROWS = 32
"""Rows beyond which drafts are not searched."""
GAIN = 1.05
"""The least expected gain over a plain step."""


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Seconds of a decode pass, by rows, and of a verification, by tokens; float64[n] for `tokens`, int64[n]."""

    tokens: np.ndarray
    decode_s: np.ndarray
    verify_s: np.ndarray

    def decode(self, rows: int) -> float:
        """Seconds of a decode pass of `rows` rows."""
        return float(np.interp(rows, self.tokens, self.decode_s))

    def verify(self, tokens: np.ndarray) -> np.ndarray:
        """Seconds of verifications of `tokens`, int64[n], tokens each; beyond the largest measured one linear."""
        beyond: np.ndarray = np.maximum(1.0, tokens / self.tokens[-1])
        return np.interp(tokens, self.tokens, self.verify_s) * beyond


def expected_tokens(acceptance: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Expected tokens of a verification of drafts of `lengths` tokens, each accepted with probability `acceptance` if
    those before it are: (1 - p^(n + 1)) / (1 - p), Leviathan, Kalman & Matias (arXiv 2211.17192), formula 1."""
    p = np.minimum(acceptance, 0.999)
    gained: np.ndarray = (1 - p ** (lengths + 1)) / (1 - p)
    return gained


def draft_length(lengths: np.ndarray, acceptance: np.ndarray, cost: ForwardCost) -> int:
    """The draft length for rows with drafts of up to `lengths` (int64[rows]) tokens; 0 if none pays.

    `acceptance`, float64[rows], is that of each row's draft. Every row of a verification is padded to the longest
    draft.
    """
    rows = len(lengths)
    gained = expected_tokens(acceptance[:, None], np.minimum(LENGTHS, lengths[:, None])).sum(0)
    rates = gained / cost.verify(rows * (LENGTHS + 1))
    best = int(rates.argmax())
    return min(int(LENGTHS[best]), int(lengths.max())) if rates[best] > GAIN * rows / cost.decode(rows) else 0
