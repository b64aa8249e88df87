"""Whether a run is paused."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TEXT = 1000
"""Characters of a text in a request, at most."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A request to pause the run (`paused`) or to end its pause; the last one in the log is valid.

    Written by `laminar runs pause` and `laminar runs unpause`. Placement reads it, and assigns no work that has not
    begun while the run is paused; the experience buffer reads it, and its groups do not age meanwhile. Requests are
    numbered from 1. `requested_by` is a user and a host, `reason` a text for people; both may be
    empty, and have at most `MAX_TEXT` characters.
    """

    number: int
    paused: bool
    requested_by: str
    reason: str
    requested_at: int
