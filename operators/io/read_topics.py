"""ReadTopics: an unbounded, self-checkpointing source over the topics of each shard."""

from __future__ import annotations

import time
from collections.abc import Iterator

import apache_beam as beam
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.runners.sdf_utils import RestrictionTrackerView
from apache_beam.transforms.core import RestrictionProvider

from infra.runners.slices import slice_seconds
from infra.runners.stopping import STOPPING
from operators.io.config import ShardConfig
from operators.io.elements import Polled, Restored
from operators.io.fold_records import is_busy
from operators.io.source import ShardSource

_FOREVER = 2**62
_SOURCES: dict[str, ShardSource] = {}


class _PollTracker(OffsetRestrictionTracker):
    """The range of polls. It checkpoints at the current poll and never splits, since a shard has one consumer.

    Prism splits slow bundles; two readers of one shard would fence each other for ever.
    """

    def try_split(self, fraction_of_remainder: float) -> tuple[OffsetRange, OffsetRange] | None:
        return super().try_split(0) if fraction_of_remainder == 0 else None


class _Polls(RestrictionProvider):
    """The restriction counts polls. Positions are kept in Kafka, so a restriction cannot become stale."""

    def initial_restriction(self, element: ShardConfig) -> OffsetRange:
        return OffsetRange(0, _FOREVER)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return _PollTracker(restriction)

    def restriction_size(self, element: ShardConfig, restriction: OffsetRange) -> int:
        return 1

    def truncate(self, element: ShardConfig, restriction: OffsetRange) -> None:
        return None


class _PollTopicsFn(beam.DoFn):
    def __init__(self, slice_s: float) -> None:
        self._slice_s = slice_s

    @beam.DoFn.unbounded_per_element()
    def process(
        self,
        element: ShardConfig,
        tracker: RestrictionTrackerView = beam.DoFn.RestrictionParam(_Polls()),  # noqa: B008
    ) -> Iterator[Restored | Polled]:
        poll = tracker.current_restriction().start
        source = _source_of(element)
        source.resume_at(poll)
        until = time.monotonic() + (element.slice_s or self._slice_s)
        while time.monotonic() < until:
            if STOPPING.is_set() or (source.ended and not is_busy(element.group)):
                final = source.final_poll() if tracker.try_claim(poll) else None
                if final is not None:
                    yield final
                tracker.try_claim(_FOREVER - 1)  # claim the end of the range, so that the runner finishes cleanly
                return
            if not tracker.try_claim(poll):
                return
            poll += 1
            yield source.next(wait=not is_busy(element.group))
        tracker.defer_remainder()


class ReadTopics(beam.PTransform):
    """Reads the topics of `shards` from their restore offsets on.

    Each shard is one element of the source, with one consumer over all its topics and partitions.
    """

    def __init__(self, *shards: ShardConfig) -> None:
        super().__init__()
        self.shards = shards

    def expand(self, pbegin: beam.pvalue.PBegin) -> beam.PCollection:
        poll = _PollTopicsFn(slice_seconds(type(pbegin.pipeline.runner).__name__))
        return pbegin | "shards" >> beam.Create(self.shards, reshuffle=False) | "poll" >> beam.ParDo(poll)


def close_sources() -> None:
    """Close every source of this process, and its session."""
    while _SOURCES:
        _SOURCES.popitem()[1].close()


def _source_of(config: ShardConfig) -> ShardSource:
    source = _SOURCES.get(config.group)
    if source is None or source.config != config:
        if source is not None:
            source.close()
        source = _SOURCES[config.group] = ShardSource(config)
    return source
