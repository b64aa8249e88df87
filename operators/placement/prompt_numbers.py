"""Prompts are numbered densely: which number can come next, so that an absurd one does not leave a gap for ever."""

from __future__ import annotations

from collections.abc import Mapping

from schemas.identity import Purpose

MOST_AHEAD = 10_000
"""How far a prompt's number may be ahead of all before it."""


class PromptNumbers:
    """The next number of each purpose, 0 where none has come.

    `state` are those of the last commit, {} before the first; None where its note does not name them: then the first of
    each purpose may have any number.
    """

    def __init__(self, state: Mapping[Purpose, int] | None) -> None:
        self._next: dict[Purpose, int] = dict(state or {})
        self._any = state is None

    def refuse(self, purpose: Purpose, number: int) -> str | None:
        """Why no prompt has this number by now; None: one may, and is taken note of."""
        due = self._next.get(purpose, number if self._any else 0)
        if number > due + MOST_AHEAD:
            return f"a prompt of number {number} does not follow number {due - 1}"
        self._next[purpose] = max(due, number + 1)
        return None

    def state(self) -> Mapping[Purpose, int]:
        """What a commit's note says of it."""
        return self._next
