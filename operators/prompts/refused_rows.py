"""How many rows of a source are refused, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from operators.prompts.question import UnusableRow
from operators.prompts.rendering import PromptTooLong
from operators.prompts.sources import PromptSource


class RefusedRows(NamedTuple):
    """The number of `rows` of a source, and how many are refused by kind."""

    rows: float
    kinds: Mapping[str, float]
    sampled: int | None = None
    """How many were rendered to see which are too long; None: all."""

    @property
    def share(self) -> float:
        return sum(self.kinds.values()) / self.rows if self.rows else 0.0

    def __str__(self) -> str:
        """`12.0 % of 200 rows (too long 20, no answer 4)`; `about 12.0 % ...` if some were not rendered."""
        kinds = ", ".join(f"{kind} {count:.0f}" for kind, count in self.kinds.items())
        about = "" if self.sampled is None else "about "
        basis = "" if self.sampled is None else f"; estimated from {self.sampled} rows"
        return f"{about}{100 * self.share:.1f} % of {self.rows:.0f} rows ({kinds}{basis})"


def estimate_refused(source: PromptSource, refused: Mapping[str, int], sampled: int) -> RefusedRows:
    """The refused rows of `source`: those of its scan, and `refused` of `sampled` questions extrapolated to the rest.

    For a source that generates questions the rows are the sampled questions.
    """
    scanned = Counter(source.refused_rows)
    accepted = source.row_count - scanned.total() if source.row_count else sampled
    kinds: dict[str, float] = {kind: float(count) for kind, count in scanned.items()}
    for kind, count in refused.items():
        kinds[kind] = kinds.get(kind, 0.0) + count / sampled * accepted
    own = source.trained_rows if source.row_count else sampled
    return RefusedRows(float(source.row_count or sampled), kinds, sampled if sampled < own else None)


def refusal_kind(error: ValueError) -> str:
    """Why a question is refused: too long, no answer or malformed."""
    if isinstance(error, PromptTooLong):
        return "too long"
    return error.kind if isinstance(error, UnusableRow) else "malformed"
