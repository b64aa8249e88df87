"""The sampling parameters of a batch of requests, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NO_TOKEN = -1
"""The token id of a row whose logits are not finite."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingColumns:
    """Sampling parameters of a batch, one entry per row; None for a parameter that no row uses.

    `temperature` is float64[rows], 1 for greedy rows; `greedy` is bool[rows]; `cut` is top_k int64[rows] (0 is off) and
    top_p float64[rows] (1 is off), both off for greedy rows.
    """

    temperature: np.ndarray | None
    greedy: np.ndarray | None
    cut: tuple[np.ndarray, np.ndarray] | None

    def repeated(self, times: int) -> SamplingColumns:
        """The columns of the whole batch `times` times in a row."""
        temperature = None if self.temperature is None else np.tile(self.temperature, times)
        greedy = None if self.greedy is None else np.tile(self.greedy, times)
        cut = None if self.cut is None else (np.tile(self.cut[0], times), np.tile(self.cut[1], times))
        return SamplingColumns(temperature, greedy, cut)

    @classmethod
    def of(cls, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray) -> SamplingColumns:
        """The columns of a batch; temperature 0 is greedy."""
        greedy = temperature == 0.0
        temperature = np.where(greedy, 1.0, temperature)
        top_k, top_p = np.where(greedy, 0, top_k), np.where(greedy, 1.0, top_p)
        return cls(
            temperature=None if (temperature == 1.0).all() else temperature,
            greedy=greedy if greedy.any() else None,
            cut=(top_k, top_p) if (top_k > 0).any() or (top_p < 1.0).any() else None,
        )
