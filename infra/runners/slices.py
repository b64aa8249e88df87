"""Time slices of sources: how long a source reads before it returns control to the runner."""

from __future__ import annotations

from collections.abc import Mapping

_SLICE_S: Mapping[str, float] = {
    # It forwards elements one by one, so long slices cost nothing; and it keeps about 20 KB of metrics of each bundle
    # forever (Beam 2.77): 400 MB per day with slices of 5 s, 3 MB per day with these.
    "FnApiRunner": 600.0,
    "PrismRunner": 5.0,
}
_OTHER_S = 0.2
"""A checkpoint waits for the end of the slice, so slices are short on a cluster."""


def slice_seconds(runner: str) -> float:
    """The slice in seconds for a runner, by the name of its class."""
    return _SLICE_S.get(runner, _OTHER_S)
