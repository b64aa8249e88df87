"""What can be trained. One member that cannot would cost its whole batch, which is trained whole or not at all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from operators.experience.members import ExperienceBlock

MOST_LOGPROB = 1e-3
"""A logprob is at most 0; rounding may put it a little above."""
MOST_LENGTH = 1_000_000
"""Tokens of one sequence, prompt included: at 8.1 bytes each they fill a record of 8 MiB."""
MOST_REWARD = float(np.finfo(np.float32).max)
"""A micro-batch has rewards in single precision."""
ANY_TOKEN = 2**31
"""A vocabulary that has whatever an id may be, but for negative ones."""
_SAMPLING = ("temperature", "top_p", "top_k")


class Verdict(NamedTuple):
    """Why a row cannot be trained. `nonsense`: no rollout of ours writes such a thing."""

    reason: str
    nonsense: bool


def untrainable(shelf: ExperienceBlock, vocabulary: int) -> dict[int, Verdict]:
    """The rows of `shelf` that a model of `vocabulary` tokens cannot be trained on, and why: most shelves have none."""
    fruitless = shelf.failed | (shelf.tokens == 0) | ~shelf.generated
    found = {row: Verdict(_failure(shelf, row), False) for row in np.flatnonzero(fruitless).tolist()}
    endless = set(np.flatnonzero(shelf.lengths > MOST_LENGTH).tolist())
    empty = set(np.flatnonzero(shelf.lengths == shelf.tokens).tolist())
    priceless = set(np.flatnonzero(np.abs(shelf.rewards) > MOST_REWARD).tolist())
    strange = _unequal(shelf) | _out_of_range(shelf, vocabulary) | _unweighable(shelf)
    for row in sorted(strange | empty | endless | priceless):
        if row not in found and (reason := _look_closely(shelf, row, vocabulary)) is not None:
            found[row] = Verdict(reason, True)
    return found


def _failure(shelf: ExperienceBlock, row: int) -> str:
    return (shelf.errors[row] or "generation failed") if shelf.failed[row] else "nothing was generated"


def _unequal(shelf: ExperienceBlock) -> set[int]:
    """Rows whose logprobs or mask are not as long as the response."""
    counts = shelf.responses.counts()
    masks = np.diff(shelf.column("response.loss_mask").offsets.to_numpy())
    return set(np.flatnonzero((shelf.logprobs.counts() != counts) | (masks != counts)).tolist())


def _out_of_range(shelf: ExperienceBlock, vocabulary: int) -> set[int]:
    """Rows with a logprob that is no logprob, or a token id that is none, whether or not it is trained."""
    found: set[int] = set()
    logprobs = shelf.logprobs.values
    for ragged, right in (
        (shelf.logprobs, (logprobs <= MOST_LOGPROB) & (logprobs > -np.inf)),
        (shelf.responses, _known(shelf.responses.values, vocabulary)),
        (shelf.prompts, _known(shelf.prompts.values, vocabulary)),
    ):
        if not right.all():
            rows = np.searchsorted(ragged.ends, np.flatnonzero(~right), side="right") - 1
            found |= set(rows.tolist())
    return found


def _known(ids: np.ndarray, vocabulary: int) -> np.ndarray:
    """Which of `ids`, int32, are in [0, `vocabulary`): a negative one is large without its sign."""
    return ids.view(np.uint32) < vocabulary


def _unweighable(shelf: ExperienceBlock) -> set[int]:
    """Rows drawn from a distribution that no trainer has: at no temperature, or from what top-p or top-k left of it."""
    temperatures, top_p, top_k = _sampling(shelf)
    no_temperature = ~((temperatures > 0) & (temperatures < np.inf))
    return set(np.flatnonzero(no_temperature | (top_p < 1) | (top_k > 0)).tolist())


def _sampling(shelf: ExperienceBlock) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Temperature as float32[rows], as a micro-batch has it, top-p and top-k."""
    temperature, *cuts = (shelf.column(f"prompt.sampling.{name}").to_numpy() for name in _SAMPLING)
    with np.errstate(over="ignore"):
        return temperature.astype(np.float32), *cuts


def _look_closely(shelf: ExperienceBlock, row: int, vocabulary: int) -> str | None:
    if shelf.lengths[row] == shelf.tokens[row]:
        return "the prompt is empty"
    if shelf.lengths[row] > MOST_LENGTH:
        return f"{shelf.lengths[row]} tokens are more than the {MOST_LENGTH} that a micro-batch record holds"
    if not abs(shelf.rewards[row]) <= MOST_REWARD:
        return f"a reward of {shelf.rewards[row]:g} is beyond single precision"
    ids = shelf.responses.between(row, row + 1)
    logprobs, mask = shelf.logprobs.between(row, row + 1), shelf.loss_masks.between(row, row + 1)
    if not len(ids) == len(logprobs) == len(mask):
        return f"{len(ids)} tokens with {len(logprobs)} logprobs and a mask of {len(mask)}"
    for used in (shelf.prompts.between(row, row + 1), ids):
        if len(unknown := used[~_known(used, vocabulary)]):
            return f"the model knows no token {unknown[0]}"
    trained = logprobs[mask]
    if not np.isfinite(trained).all():
        return "a behaviour logprob is not finite"
    if (trained > MOST_LOGPROB).any():
        return "a behaviour logprob is above 0"
    temperature, top_p, top_k = (column[row] for column in _sampling(shelf))
    if temperature <= 0:
        return f"drawn at temperature {temperature:g}: greedy answers have no probability to train"
    if not temperature < np.inf:
        return "drawn at a temperature beyond single precision"
    if top_p < 1 or top_k > 0:
        return f"drawn with top_p {top_p:g} and top_k {top_k}: the trainer's distribution has no such cut"
    return None
