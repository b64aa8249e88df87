"""Recent texts and where their n-grams occurred, to draft the next tokens of a trajectory.

The texts are in a ring, and each position links to the previous one with the same last tokens, as in the hash chains of
LZ77 compressors: memory is bounded (28 bytes a token), and the oldest texts are forgotten first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

GRAM = 3
"""Tokens that a trajectory and a text have in common at least before a draft."""
LONGEST = 24
"""The longest suffix that is compared."""
SAME_PROMPT = 4
"""Further tokens that a match in a text of the same prompt counts as."""
TRIES = 8
"""Occurrences that are compared, the newest first."""
_END = -1
_MIX = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class Text(NamedTuple):
    """Tokens int32[n] of a trajectory, and the key of its prompt."""

    prompt: int
    tokens: np.ndarray


@dataclass(frozen=True, slots=True)
class Match:
    """The last `tokens` tokens of a trajectory occur in the index up to position `at`, in a text of its prompt if
    `same_prompt`."""

    at: int
    tokens: int
    same_prompt: bool


class DraftIndex:
    """The last `capacity` tokens of the texts added; the capacity is a power of two."""

    def __init__(self, capacity: int = 1 << 20) -> None:
        self._capacity, self._mask, self._shift = capacity, capacity - 1, 65 - capacity.bit_length()
        self._tokens, self._prompts = array("i", [_END]) * capacity, array("q", [0]) * capacity
        self._previous, self._heads = array("q", [-1]) * capacity, array("q", [-1]) * capacity
        self._end = 0
        """The position of the next token; positions count from the first token ever added."""

    def add(self, texts: Sequence[Text]) -> None:
        """Append `texts`; of more than half of the capacity only the end."""
        if not texts:
            return
        most, end = self._capacity // 2, np.array([_END], np.int32)
        tokens = np.concatenate([part for text in texts for part in (text.tokens.astype(np.int32), end)])[-most:]
        prompts = np.repeat([text.prompt for text in texts], [len(text.tokens) + 1 for text in texts])[-most:]
        positions = np.arange(self._end, self._end + len(tokens))
        np.frombuffer(self._tokens, np.int32)[positions & self._mask] = tokens
        np.frombuffer(self._prompts, np.int64)[positions & self._mask] = prompts
        self._end += len(tokens)
        self._link(tokens, positions)

    def find(self, prompt: int, tail: Sequence[int]) -> Match | None:
        """The best match for a trajectory of `prompt` whose last tokens are `tail`; None without one."""
        if len(tail) < GRAM:
            return None
        best, best_score = None, 0
        at = self._heads[self._bucket(tail[-GRAM:])]
        for _ in range(TRIES):
            if at < max(0, self._end - self._capacity + LONGEST):  # it, or tokens before it, are overwritten
                break
            if self._tokens[(at + 1) & self._mask] != _END:
                common, same = self._common(at, tail), self._prompts[at & self._mask] == prompt
                score = common + SAME_PROMPT * same
                if common >= GRAM and score > best_score:
                    best, best_score = Match(at, common, same), score
            before = self._previous[at & self._mask]
            if before >= at:
                break
            at = before
        return best

    def follow(self, match: Match, gained: Sequence[int]) -> Match | None:
        """`match` after the trajectory has gained these tokens; None if the text continues otherwise."""
        at, mask = match.at, self._mask
        if at < self._end - self._capacity or any(
            self._tokens[(at + i) & mask] != token for i, token in enumerate(gained, 1)
        ):
            return None
        at += len(gained)
        if self._tokens[(at + 1) & mask] == _END:
            return None
        return Match(at, match.tokens + len(gained), match.same_prompt)

    def continuation(self, match: Match, most: int) -> list[int]:
        """The tokens that follow `match` in its text, at most `most`."""
        found: list[int] = []
        for at in range(match.at + 1, match.at + 1 + most):
            if (token := self._tokens[at & self._mask]) == _END:
                break
            found.append(token)
        return found

    def _common(self, at: int, tail: Sequence[int]) -> int:
        """How many of the last tokens of `tail` are those up to position `at`, at most `LONGEST`."""
        most = min(len(tail), LONGEST)
        for i in range(most):
            if self._tokens[(at - i) & self._mask] != tail[-1 - i]:
                return i
        return most

    def _bucket(self, gram: Sequence[int]) -> int:
        mixed = 0
        for token in gram:
            mixed = (mixed + token) * _MIX & _WORD
        return mixed >> self._shift

    def _link(self, tokens: np.ndarray, positions: np.ndarray) -> None:
        """Link each new n-gram to its previous occurrence."""
        count = max(0, len(tokens) - GRAM + 1)
        mixed, whole = np.zeros(count, np.uint64), np.ones(count, bool)
        for i in range(GRAM):
            part = tokens[i : i + count]
            whole &= part != _END
            mixed = (mixed + part.astype(np.uint64)) * np.uint64(_MIX)
        buckets, ends = (mixed >> np.uint64(self._shift)).astype(np.int64)[whole], positions[GRAM - 1 :][whole]
        if not len(ends):
            return
        order = np.argsort(buckets, kind="stable")
        buckets, ends = buckets[order], ends[order]
        first = np.concatenate([[True], buckets[1:] != buckets[:-1]])
        heads, previous = np.frombuffer(self._heads, np.int64), np.frombuffer(self._previous, np.int64)
        previous[ends & self._mask] = np.where(first, heads[buckets], np.concatenate([[-1], ends[:-1]]))
        last = np.concatenate([first[1:], [True]])
        heads[buckets[last]] = ends[last]
