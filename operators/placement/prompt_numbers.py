"""Prompts are numbered densely: validates the next number, so that a wrong one does not leave a permanent gap."""

from __future__ import annotations

from collections.abc import Mapping

from schemas.identity import Purpose

MAX_AHEAD = 10_000
"""How far the number of a prompt may be ahead of all earlier ones."""


class PromptNumbers:
    """The next number of each purpose, 0 before the first prompt.

    `state` is that of the last commit, {} before the first commit. None if its note has no such state: the first prompt
    of each purpose may then have any number.
    """

    def __init__(self, state: Mapping[Purpose, int] | None) -> None:
        self._next: dict[Purpose, int] = dict(state or {})
        self._accepts_any = state is None

    def invalid_reason(self, purpose: Purpose, number: int) -> str | None:
        """Why the number is invalid; None if it is valid, which is recorded."""
        expected = self._next.get(purpose, number if self._accepts_any else 0)
        if number > expected + MAX_AHEAD:
            return f"prompt number {number} is more than {MAX_AHEAD} ahead of number {expected - 1}"
        self._next[purpose] = max(expected, number + 1)
        return None

    def state(self) -> Mapping[Purpose, int]:
        """The next numbers, for the commit note."""
        return self._next
