"""ReadTopics: an unbounded, self-checkpointing source over the topics of each shard."""

from __future__ import annotations

import time
from collections.abc import Iterator

import apache_beam as beam
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.runners.sdf_utils import RestrictionTrackerView
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import Timestamp

from infra.runners.stopping import STOPPING
from operators.io.config import ShardConfig
from operators.io.elements import Polled, Restored
from operators.io.fold_records import idle_seconds, is_busy
from operators.io.poll_range import FOREVER, PollRange, slice_seconds
from operators.io.source import open_source

_WATERMARK = beam.DoFn.WatermarkEstimatorParam(ManualWatermarkEstimator.default_provider())


class _PollTopicsFn(beam.DoFn):
    def __init__(self, slice_s: float) -> None:
        self._slice_s = slice_s

    @beam.DoFn.unbounded_per_element()
    def process(
        self,
        element: ShardConfig,
        tracker: RestrictionTrackerView = beam.DoFn.RestrictionParam(PollRange()),  # noqa: B008
        watermark: ManualWatermarkEstimator = _WATERMARK,
    ) -> Iterator[Restored | Polled | TimestampedValue]:
        poll = tracker.current_restriction().start
        source = open_source(element)
        source.resume_at(poll)
        until = time.monotonic() + (element.slice_s or self._slice_s)
        while time.monotonic() < until:
            if STOPPING.is_set() or (source.ended and not is_busy(element.group)):
                final = source.final_poll() if tracker.try_claim(poll) else None
                if final is not None:
                    yield final
                tracker.try_claim(FOREVER - 1)  # claim the end of the range, so that the runner finishes cleanly
                return
            if not tracker.try_claim(poll):
                return
            poll += 1
            yield _timed(source.next(wait=idle_seconds(element.group)), watermark)
        tracker.defer_remainder()


def _timed(element: Restored | Polled, watermark: ManualWatermarkEstimator) -> Restored | Polled | TimestampedValue:
    """`element` at the time of the newest record so far, to which the watermark moves.

    So a runner's interface shows how far behind a shard is. No step depends on it: records of different topics are not
    in the order of their times. A time in the future, which other machines may write, counts as now.
    """
    known = watermark.current_watermark()
    if isinstance(element, Polled) and element.records:
        newest = min(max(record.timestamp for record in element.records) / 1000, time.time())
        if known is None or known < newest:
            known = Timestamp.of(newest)
            watermark.set_watermark(known)
    return element if known is None else TimestampedValue(element, known)


class ReadTopics(beam.PTransform):
    """Reads the topics of `shards` from their restore offsets on.

    Each shard is one element of the source, with one consumer over all its topics and partitions. Applied to polls
    that ReadBranches has read, it is the place in a branch where they arrive.
    """

    def __init__(self, *shards: ShardConfig) -> None:
        super().__init__()
        self.shards = shards

    def display_data(self) -> dict[str, str]:
        """Consumer groups and topics, for the runner's interface."""
        topics = dict.fromkeys(each.topic.short_name for shard in self.shards for each in shard.inputs)
        return {"groups": ", ".join(shard.group for shard in self.shards), "topics": ", ".join(topics)}

    def expand(self, pbegin: beam.pvalue.PBegin | beam.PCollection) -> beam.PCollection:
        if isinstance(pbegin, beam.PCollection):
            return pbegin
        poll = _PollTopicsFn(slice_seconds(type(pbegin.pipeline.runner).__name__))
        return pbegin | "shards" >> beam.Create(self.shards, reshuffle=False) | "poll" >> beam.ParDo(poll)
