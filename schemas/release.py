"""Releases: whose runs this code reads, and for whose roles it writes.

While the roles of a run are upgraded one by one, two releases are in it. The run's release is that of its oldest roles:
newer roles write records that those can read, until `laminar runs upgrade`.
"""

from __future__ import annotations

import re

RELEASE = "0.3.0.dev0"
"""Written to a run's state.json."""
NEWEST = RELEASE.partition(".dev")[0]
"""The run's release once all of its roles have this one."""
FIRST = "0.2.0"
"""The run's release of runs in which none is recorded."""
_NUMBERS = re.compile(r"\d{1,4}\.\d{1,4}\.\d{1,4}")


class OldRelease(RuntimeError):
    """A run of release 0.1.0. Its records and folder differ, so later releases reject it before they write to it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} was written by release 0.1.0: use release 0.1.0 for this run")


class NewerRelease(RuntimeError):
    """The run's release is a later one, whose records this one cannot read."""


class NotInRelease(ValueError):
    """A record that the roles of the run's release cannot read, although it needs one of them."""

    def __init__(self, what: str, release: str) -> None:
        super().__init__(
            f"release {release} has no {what}, and this run still has roles of it: upgrade all of them, then run "
            "`laminar runs upgrade`"
        )


def is_release(text: str) -> bool:
    """Whether `text` is three numbers, such as "0.2.0"."""
    return _NUMBERS.fullmatch(text) is not None


def release_numbers(release: str) -> tuple[int, ...]:
    """`release` in a form that can be compared. Raises ValueError for anything else."""
    if not is_release(release):
        raise ValueError(f"{release[:40]!r} is not a release: three numbers, such as {NEWEST}")
    return tuple(map(int, release.split(".")))


_written = NEWEST


def write_for(release: str) -> None:
    """Write the records of `release`, the run's release, from now on in this process; it has roles of one run.

    Raises NewerRelease, and ValueError if it is no release.
    """
    global _written
    if release_numbers(release) > release_numbers(NEWEST):
        raise NewerRelease(f"this run has been upgraded to release {release}, and this is {RELEASE}: install {release}")
    _written = release


def written_release() -> str:
    """The release whose records this process writes."""
    return _written
