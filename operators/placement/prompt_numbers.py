"""Which prompts placement accepts, by their numbers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from infra.kafka.role_notes import NO_NOTES, NotesUnavailable, ReadNotes
from operators.io.validation import MAX_PROMPTS_AHEAD
from schemas.identity import Purpose, group_id

log = logging.getLogger(__name__)
PROMPT_WRITERS: Mapping[Purpose, str] = {"train": "prompts", "evaluation": "evaluation"}
"""The role that numbers the prompts of a purpose."""


class PromptNumbers:
    """The next number of each purpose, 0 before the first prompt. Prompts are numbered densely: a wrong number would
    leave a permanent gap. A start reads again, in order, those whose trajectories have not all begun.

    `state` is that of the last commit, {} before the first commit. None if its note has no such state: the first prompt
    of each purpose may then have any number. `notes` also reads those of open transactions: a prompt may be visible
    before its writer's note counts as committed. It is called at most once a poll, for a number that is not the next.
    """

    def __init__(self, state: Mapping[Purpose, int] | None, notes: ReadNotes = NO_NOTES) -> None:
        self._next: dict[Purpose, int] = dict(state or {})
        self._accepts_any = state is None
        self._notes = notes
        self._written: dict[Purpose, int | None] = {}
        self._last: dict[Purpose, int] = {}
        """The last number that this start has accepted; not one after a hole, which may be of another program."""

    def begin_poll(self) -> None:
        """Read the notes again when they are needed: further prompts may have been written."""
        self._written.clear()

    def invalid_reason(self, purpose: Purpose, number: int) -> str | None:
        """Why the number is invalid; None if it is valid, which is recorded."""
        expected, last = self._next.get(purpose, number if self._accepts_any else 0), self._last.get(purpose, -1)
        if number <= last:
            return f"prompt number {number} comes after number {last}: it is of another program"
        if number > expected + MAX_PROMPTS_AHEAD:
            return f"prompt number {number} is more than {MAX_PROMPTS_AHEAD} ahead of number {expected - 1}"
        if number > expected:
            written = self._written_by_role(purpose)
            if written is not None and number >= written:
                return (
                    f"prompt number {number} is of another program: the next of {PROMPT_WRITERS[purpose]} is {written}"
                )
            log.error(
                "the log lacks prompts %s to %s: it continues with %s, so their groups are never generated. With "
                'experience.over_age = "wait" the buffer waits for them for ever: start a new run from a checkpoint',
                *(group_id(purpose, each) for each in (expected, number - 1, number)),
            )
        if number <= self._next.get(purpose, -1 if self._accepts_any else 0):
            self._last[purpose] = number
        self._next[purpose] = max(expected, number + 1)
        return None

    def state(self) -> Mapping[Purpose, int]:
        """The next numbers, for the commit note."""
        return self._next

    def _written_by_role(self, purpose: Purpose) -> int | None:
        """The next number of the role that writes prompts of `purpose`; None if it is not known now."""
        if purpose not in self._written:
            self._written[purpose] = None
            try:
                notes = self._notes(PROMPT_WRITERS[purpose])
            except NotesUnavailable as error:
                log.warning("whether prompts are of another program is not known: %s", error)
            else:
                self._written[purpose] = next_prompt_number(purpose, notes[0].state) if 0 in notes else None
        return self._written[purpose]


def next_prompt_number(purpose: Purpose, state: Mapping[str, Any]) -> int | None:
    """The next number of `purpose` by `state`, which is in a commit note of its writer; None if it has none."""
    found = state.get("number") if purpose == "train" else next(iter(state.get("evaluated", ())), None)
    return found if isinstance(found, int) else None
