"""What can be trained. One member that cannot would cost its whole batch, which is trained whole or not at all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from operators.experience.members import Shelf

MOST_LOGPROB = 1e-3
"""A logprob is at most 0; rounding may put it a little above."""
MOST_LENGTH = 1_000_000
"""Tokens of one sequence, prompt included: at 8.1 bytes each they fill a record of 8 MiB."""
_SAMPLING = ("temperature", "top_p", "top_k")


class Verdict(NamedTuple):
    """Why a row cannot be trained. `nonsense`: no rollout of ours writes such a thing."""

    reason: str
    nonsense: bool


def untrainable(shelf: Shelf) -> dict[int, Verdict]:
    """The rows of `shelf` that cannot be trained, and why: most shelves have none."""
    fruitless = shelf.failed | (shelf.tokens == 0) | ~shelf.generated
    found = {row: Verdict(_failure(shelf, row), False) for row in np.flatnonzero(fruitless).tolist()}
    endless = set(np.flatnonzero(shelf.lengths > MOST_LENGTH).tolist())
    empty = set(np.flatnonzero(shelf.lengths == shelf.tokens).tolist())
    for row in sorted(_unequal(shelf) | _out_of_range(shelf) | _unweighable(shelf) | empty | endless):
        if row not in found and (reason := _look_closely(shelf, row)) is not None:
            found[row] = Verdict(reason, True)
    return found


def _failure(shelf: Shelf, row: int) -> str:
    return (shelf.errors[row] or "generation failed") if shelf.failed[row] else "nothing was generated"


def _unequal(shelf: Shelf) -> set[int]:
    """Rows whose logprobs or mask are not as long as the response."""
    counts = shelf.responses.counts()
    masks = np.diff(shelf.column("response.loss_mask").offsets.to_numpy())
    return set(np.flatnonzero((shelf.logprobs.counts() != counts) | (masks != counts)).tolist())


def _out_of_range(shelf: Shelf) -> set[int]:
    """Rows with a logprob that is no logprob, or a token id that is none, whether or not it is trained."""
    found: set[int] = set()
    for ragged, sound in (
        (shelf.logprobs, lambda values: values <= MOST_LOGPROB),
        (shelf.responses, lambda values: values >= 0),
        (shelf.prompts, lambda values: values >= 0),
    ):
        used = ragged.values
        right = sound(used) & (used > -np.inf)
        if not right.all():
            rows = np.searchsorted(ragged.ends, np.flatnonzero(~right), side="right") - 1
            found |= set(rows.tolist())
    return found


def _unweighable(shelf: Shelf) -> set[int]:
    """Rows drawn from a distribution that no trainer has: greedily, or from what top-p or top-k left of it."""
    temperatures, top_p, top_k = _sampling(shelf)
    return set(np.flatnonzero((temperatures <= 0) | (top_p < 1) | (top_k > 0)).tolist())


def _sampling(shelf: Shelf) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Temperature as float32[rows], as a micro-batch has it, top-p and top-k."""
    temperature, *cuts = (shelf.column(f"prompt.sampling.{name}").to_numpy() for name in _SAMPLING)
    return temperature.astype(np.float32), *cuts


def _look_closely(shelf: Shelf, row: int) -> str | None:
    if shelf.lengths[row] == shelf.tokens[row]:
        return "the prompt is empty"
    if shelf.lengths[row] > MOST_LENGTH:
        return f"{shelf.lengths[row]} tokens are more than the {MOST_LENGTH} that a micro-batch record holds"
    ids = shelf.responses.between(row, row + 1)
    logprobs, mask = shelf.logprobs.between(row, row + 1), shelf.loss_masks.between(row, row + 1)
    if not len(ids) == len(logprobs) == len(mask):
        return f"{len(ids)} tokens with {len(logprobs)} logprobs and a mask of {len(mask)}"
    if (ids < 0).any() or (shelf.prompts.between(row, row + 1) < 0).any():
        return "a token id is negative"
    trained = logprobs[mask]
    if not np.isfinite(trained).all():
        return "a behaviour logprob is not finite"
    if (trained > MOST_LOGPROB).any():
        return "a behaviour logprob is above 0"
    temperature, top_p, top_k = (column[row] for column in _sampling(shelf))
    if temperature <= 0:
        return f"drawn at temperature {temperature:g}: greedy answers have no probability to train"
    if top_p < 1 or top_k > 0:
        return f"drawn with top_p {top_p:g} and top_k {top_k}: the trainer's distribution has no such cut"
    return None
