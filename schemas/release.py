"""The release whose runs this code reads."""

from __future__ import annotations

RELEASE = "0.3.0.dev0"
"""Written to a run's state.json."""


class OldRelease(RuntimeError):
    """A run of release 0.1.0. Its records and folder differ, so later releases reject it before they write to it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} was written by release 0.1.0: use release 0.1.0 for this run")
