"""How long a source may work at a time before it hands back to the runner."""

from __future__ import annotations

from collections.abc import Mapping

_SLICE_S: Mapping[str, float] = {
    # It passes elements on one by one, so long slices cost nothing; and it keeps some 20 KB of metrics of every bundle
    # for ever (Beam 2.77): 400 MB a day at slices of 5 s, 3 MB a day at these.
    "FnApiRunner": 600.0,
    "PrismRunner": 5.0,
}
_OTHER_S = 0.2
"""A checkpoint waits for the end of the slice, so a cluster's are short."""


def slice_seconds(runner: str) -> float:
    """The slice for a runner, by the name of its class."""
    return _SLICE_S.get(runner, _OTHER_S)
