"""What can be trained. One member that cannot would cost its whole batch, which is trained whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from operators.experience.members import Member, Shelf

MOST_LOGPROB = 1e-3
"""A logprob is at most 0; rounding may put it a little above."""
_SAMPLING = ("temperature", "top_p", "top_k")


def failure(member: Member) -> str | None:
    """Why `member` brought nothing to train; None if it did."""
    if member.failed:
        return member.error or "generation failed"
    return "nothing was generated" if not member.tokens or member.version is None else None


def nonsense(members: Sequence[Member]) -> list[str | None]:
    """Why each of `members`, all of one shelf and in its order, cannot be trained though it may have been generated;
    None if it can. No rollout of ours writes such a thing.
    """
    shelf = members[0].shelf
    suspects = _unequal(shelf) | _out_of_range(shelf) | _unweighable(shelf)
    return [
        "the prompt is empty"
        if member.length == member.tokens
        else _look_closely(shelf, member.row)
        if member.row in suspects
        else None
        for member in members
    ]


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
