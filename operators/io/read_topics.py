"""ReadTopics: an unbounded, self-checkpointing source over the topics of one shard."""

from __future__ import annotations

import time
from collections.abc import Iterator

import apache_beam as beam
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.transforms.core import RestrictionProvider

from infra.runners.stopping import STOPPING
from operators.io.config import ShardConfig
from operators.io.elements import Polled, Restored
from operators.io.fold_records import is_busy
from operators.io.source import ShardSource

_FOREVER = 2**62
_SOURCES: dict[str, ShardSource] = {}


class _Polls(RestrictionProvider):
    """The restriction counts polls: where reading stands is Kafka's business, so nothing here can grow old."""

    def initial_restriction(self, element: ShardConfig) -> OffsetRange:
        return OffsetRange(0, _FOREVER)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: ShardConfig, restriction: OffsetRange) -> int:
        return 1

    def truncate(self, element: ShardConfig, restriction: OffsetRange) -> None:
        return None


class _PollTopicsFn(beam.DoFn):
    @beam.DoFn.unbounded_per_element()
    def process(
        self,
        element: ShardConfig,
        tracker=beam.DoFn.RestrictionParam(_Polls()),  # type: ignore[no-untyped-def]  # noqa: B008
    ) -> Iterator[Restored | Polled]:
        source = _SOURCES.setdefault(element.group, ShardSource(element))
        poll = tracker.current_restriction().start
        until = time.monotonic() + element.slice_s
        while time.monotonic() < until:
            if STOPPING.is_set():
                tracker.try_claim(_FOREVER - 1)  # to the end of the range: the runner finishes cleanly
                return
            if not tracker.try_claim(poll):
                return
            poll += 1
            yield source.next(wait=not is_busy(element.group))
        tracker.defer_remainder()


class ReadTopics(beam.PTransform):
    """Everything written to the topics of `shards`, from their restore offsets on.

    One element of the source is one shard with one consumer over all its topics and partitions.
    """

    def __init__(self, *shards: ShardConfig) -> None:
        super().__init__()
        self._shards = shards

    def expand(self, pbegin: beam.pvalue.PBegin) -> beam.PCollection:
        return pbegin | "shards" >> beam.Create(self._shards, reshuffle=False) | "poll" >> beam.ParDo(_PollTopicsFn())
