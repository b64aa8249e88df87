"""Finds members that cannot be trained. One of them would make its whole batch fail, so they never enter the buffer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from infra.workers.error_text import first_line
from operators.experience.members import ExperienceBlock

MAX_LOGPROB = 1e-3
"""A logprob is at most 0, up to rounding."""
MAX_LENGTH = 1_000_000
"""Tokens of one sequence, prompt included: at 8.1 bytes each they fill a record of 8 MiB."""
MAX_REWARD = float(np.finfo(np.float32).max)
"""A micro-batch holds rewards in single precision."""
ANY_TOKEN = 2**31
"""A vocabulary size that accepts every int32 token id that is not negative."""
_SAMPLING = ("temperature", "top_p", "top_k")


class Untrainable(NamedTuple):
    """Why a row cannot be trained. `malformed`: no correct rollout writes such a row."""

    reason: str
    malformed: bool


def untrainable(
    block: ExperienceBlock, vocabulary: int, rewards_failures: Mapping[str, bool] = MappingProxyType({})
) -> dict[int, Untrainable]:
    """The rows of `block` that a model of `vocabulary` tokens cannot be trained on, and why; usually none.

    `rewards_failures`: by task, and for all others by "", whether failed trajectories have a reward to train.
    """
    no_response = _unmeasured(block, rewards_failures) | (block.tokens == 0) | ~block.generated
    found = {row: Untrainable(_failure(block, row), False) for row in np.flatnonzero(no_response).tolist()}
    too_long = set(np.flatnonzero(block.lengths > MAX_LENGTH).tolist())
    no_prompt = set(np.flatnonzero(block.lengths == block.tokens).tolist())
    large_reward = set(np.flatnonzero(np.abs(block.rewards) > MAX_REWARD).tolist())
    suspects = (
        _unequal_lengths(block)
        | _wrong_conversations(block)
        | _wrong_rewards(block)
        | _out_of_range(block, vocabulary)
        | _untrainable_sampling(block)
    )
    for row in sorted(suspects | no_prompt | too_long | large_reward):
        if row not in found and (reason := _reason(block, row, vocabulary)) is not None:
            found[row] = Untrainable(reason, True)
    return found


def _unmeasured(block: ExperienceBlock, rewards_failures: Mapping[str, bool]) -> np.ndarray:
    """Rows without a reward, bool[rows]: their generation, environment or verifier failed."""
    found = block.failed | block.unverified
    if found.any() and any(rewards_failures.values()):
        tasks, others = block.column("prompt.task"), rewards_failures.get("", False)
        for row in np.flatnonzero(found).tolist():
            found[row] = not (rewards_failures.get(tasks[row].as_py(), others) and _has_turn(block, row))
    return found


def _has_turn(block: ExperienceBlock, row: int) -> bool:
    """Whether the model's part is there: of a failed episode any turn, of a response all."""
    if not block.failed[row]:
        return True
    in_episode = block.column("episode.ending")[row].is_valid
    return in_episode and bool(block.loss_masks.between(row, row + 1).any())


def _failure(block: ExperienceBlock, row: int) -> str:
    error = block.errors[row] or ("generation failed" if block.failed[row] else "nothing was generated")
    return first_line(error)


def _unequal_lengths(block: ExperienceBlock) -> set[int]:
    """Rows whose logprobs or loss mask differ in length from the response."""
    counts = block.responses.counts()
    masks = np.diff(block.column("response.loss_mask").offsets.to_numpy())
    return set(np.flatnonzero((block.logprobs.counts() != counts) | (masks != counts)).tolist())


def _wrong_conversations(block: ExperienceBlock) -> set[int]:
    """Rows whose conversations do not follow each other in the response, or begin with a trained token."""
    starts, tokens = block.conversation_starts, block.responses.counts()
    found: set[int] = set()
    for row in np.flatnonzero(starts.counts() > 1).tolist():
        if _conversation_error(starts.between(row, row + 1), block.loss_masks.between(row, row + 1), tokens[row]):
            found.add(row)
    return found


def _conversation_error(starts: np.ndarray, mask: np.ndarray, tokens: int) -> str | None:
    if starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] >= tokens:
        return f"its conversations begin at {starts[:5].tolist()} of {tokens} tokens"
    if len(mask) == tokens and mask[starts[1:]].any():
        return "the first token of a conversation is in the loss mask"
    return None


def _wrong_rewards(block: ExperienceBlock) -> set[int]:
    """Rows with another number of rewards than of conversations, or with such a reward beyond single precision."""
    rewards, conversations = block.conversation_rewards, block.conversation_starts.counts()
    counts = rewards.counts()
    large = np.searchsorted(rewards.ends, np.flatnonzero(~(np.abs(rewards.values) <= MAX_REWARD)), side="right") - 1
    return {*np.flatnonzero((counts > 0) & (counts != conversations)).tolist(), *large.tolist()}


def _out_of_range(block: ExperienceBlock, vocabulary: int) -> set[int]:
    """Rows with an invalid logprob or token id, whether or not the loss mask selects it."""
    found: set[int] = set()
    logprobs = block.logprobs.values
    for ragged, valid in (
        (block.logprobs, (logprobs <= MAX_LOGPROB) & (logprobs > -np.inf)),
        (block.responses, _in_vocabulary(block.responses.values, vocabulary)),
        (block.prompts, _in_vocabulary(block.prompts.values, vocabulary)),
    ):
        if not valid.all():
            rows = np.searchsorted(ragged.ends, np.flatnonzero(~valid), side="right") - 1
            found |= set(rows.tolist())
    return found


def _in_vocabulary(ids: np.ndarray, vocabulary: int) -> np.ndarray:
    """Which of `ids`, int32, are in [0, `vocabulary`); read as unsigned, a negative id is too large."""
    return ids.view(np.uint32) < vocabulary


def _untrainable_sampling(block: ExperienceBlock) -> set[int]:
    """Rows drawn from a distribution that the trainer does not compute: greedy, top-p or top-k sampling."""
    temperatures, top_p, top_k = _sampling(block)
    bad_temperature = ~((temperatures > 0) & (temperatures < np.inf))
    return set(np.flatnonzero(bad_temperature | (top_p < 1) | (top_k > 0)).tolist())


def _sampling(block: ExperienceBlock) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Temperature (float32[rows], as in a micro-batch), top-p and top-k."""
    temperature, *cuts = (block.column(f"prompt.sampling.{name}").to_numpy() for name in _SAMPLING)
    with np.errstate(over="ignore"):
        return temperature.astype(np.float32), *cuts


def _reason(block: ExperienceBlock, row: int, vocabulary: int) -> str | None:
    """Why suspect `row` cannot be trained; None if only positions outside its loss mask are invalid."""
    if block.lengths[row] == block.tokens[row]:
        return "the prompt is empty"
    if block.lengths[row] > MAX_LENGTH:
        return f"{block.lengths[row]} tokens are more than the {MAX_LENGTH} that a micro-batch record holds"
    if not abs(block.rewards[row]) <= MAX_REWARD:
        return f"a reward of {block.rewards[row]:g} is beyond single precision"
    ids = block.responses.between(row, row + 1)
    logprobs, mask = block.logprobs.between(row, row + 1), block.loss_masks.between(row, row + 1)
    if not len(ids) == len(logprobs) == len(mask):
        return f"{len(ids)} tokens with {len(logprobs)} logprobs and a mask of {len(mask)}"
    starts = block.conversation_starts.between(row, row + 1)
    if len(starts) > 1 and (reason := _conversation_error(starts, mask, len(ids))) is not None:
        return reason
    rewards = block.conversation_rewards.between(row, row + 1)
    if len(rewards) not in (0, len(starts)):
        return f"{len(starts)} conversations with {len(rewards)} rewards"
    if not (np.abs(rewards) <= MAX_REWARD).all():
        return f"the rewards of its conversations, {rewards[:5].tolist()}, are beyond single precision"
    for used in (block.prompts.between(row, row + 1), ids):
        if len(unknown := used[~_in_vocabulary(used, vocabulary)]):
            return f"token {unknown[0]} is not in the model's vocabulary"
    trained = logprobs[mask]
    if not np.isfinite(trained).all():
        return "a behaviour logprob is not finite"
    if (trained > MAX_LOGPROB).any():
        return "a behaviour logprob is above 0"
    temperature, top_p, top_k = (column[row] for column in _sampling(block))
    if temperature <= 0:
        return f"sampled at temperature {temperature:g}: greedy answers have no probability to train"
    if not temperature < np.inf:
        return "sampled at a temperature beyond single precision"
    if top_p < 1 or top_k > 0:
        return f"sampled with top_p {top_p:g} and top_k {top_k}: the trainer's distribution is not truncated"
    return None
