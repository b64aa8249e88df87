"""The restriction of a source: a range of polls, of which one reader takes one after the other for a time slice."""

from __future__ import annotations

from collections.abc import Mapping

from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.transforms.core import RestrictionProvider

FOREVER = 2**62
"""The end of the range: no source makes so many polls."""


class PollTracker(OffsetRestrictionTracker):
    """The range of polls. It checkpoints at the current poll and never splits, since a shard has one consumer.

    Prism splits slow bundles; two readers of one shard would fence each other for ever.
    """

    def try_split(self, fraction_of_remainder: float) -> tuple[OffsetRange, OffsetRange] | None:
        return super().try_split(0) if fraction_of_remainder == 0 else None


class PollRange(RestrictionProvider):
    """The restriction counts polls. Positions are kept in Kafka, so a restriction cannot become stale."""

    def initial_restriction(self, element: object) -> OffsetRange:
        return OffsetRange(0, FOREVER)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return PollTracker(restriction)

    def restriction_size(self, element: object, restriction: OffsetRange) -> int:
        return 1

    def truncate(self, element: object, restriction: OffsetRange) -> None:
        return None


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
