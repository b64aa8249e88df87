"""ReadBranches: one source for several branches of a pipeline, for runners that run one source at a time.

Beam's embedded runner executes the sources of a pipeline one after the other, and would never come to the second. Here
one source polls the shards of all branches, see `branch_polls`. Every shard keeps its own session, ledger and
transactions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import apache_beam as beam
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.runners.sdf_utils import RestrictionTrackerView
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import Timestamp

from infra.runners.stopping import STOPPING
from operators.io.branch_polls import BranchPolls, BranchShard
from operators.io.elements import Polled, Restored
from operators.io.fold_records import idle_seconds
from operators.io.poll_range import FOREVER, PollRange, slice_seconds
from operators.io.source import open_source

WATERMARK = beam.DoFn.WatermarkEstimatorParam(ManualWatermarkEstimator.default_provider())
"""The default of the parameter of `process` that `timed` takes."""
_RUNNING: dict[tuple[str, ...], BranchPolls] = {}


def timed(element: Restored | Polled, watermark: ManualWatermarkEstimator) -> Restored | Polled | TimestampedValue:
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


class _PollBranchesFn(beam.DoFn):
    def __init__(self, slice_s: float) -> None:
        self._slice_s = slice_s

    @beam.DoFn.unbounded_per_element()
    def process(
        self,
        element: tuple[BranchShard, ...],
        tracker: RestrictionTrackerView = beam.DoFn.RestrictionParam(PollRange()),  # noqa: B008
        watermark: ManualWatermarkEstimator = WATERMARK,
    ) -> Iterator[beam.pvalue.TaggedOutput]:
        poll = tracker.current_restriction().start
        polls = _polls_of(element)
        until = time.monotonic() + self._slice_s
        while time.monotonic() < until:
            if STOPPING.is_set():
                if tracker.try_claim(poll):
                    for found in (*polls.stop(), *polls.final_polls()):
                        yield beam.pvalue.TaggedOutput(found.branch, found.element)
                tracker.try_claim(FOREVER - 1)  # claim the end of the range, so that the runner finishes cleanly
                return
            next_poll = polls.next()
            if next_poll is None:
                continue
            if not tracker.try_claim(poll):
                polls.put_back(next_poll)
                return
            poll += 1
            yield beam.pvalue.TaggedOutput(next_poll.branch, timed(next_poll.element, watermark))
            polls.mark_folded(next_poll.group)
        tracker.defer_remainder()


class ReadBranches(beam.PTransform):
    """Reads the topics of `shards`; the polls of a branch's shards are the output with the branch's name."""

    def __init__(self, shards: Sequence[BranchShard]) -> None:
        super().__init__()
        self.shards = tuple(shards)

    def expand(self, pbegin: beam.pvalue.PBegin) -> beam.pvalue.DoOutputsTuple:
        branches = dict.fromkeys(each.branch for each in self.shards)
        poll = _PollBranchesFn(slice_seconds(type(pbegin.pipeline.runner).__name__))
        polls = beam.ParDo(poll).with_outputs(*branches)
        return pbegin | "branches" >> beam.Create([self.shards], reshuffle=False) | "poll" >> polls


Build = Callable[[beam.Pipeline | beam.pvalue.PBegin | beam.PCollection], None]
"""Adds the graph of a role: to the begin of a pipeline, or to the polls of its shards."""


class Branch(beam.PTransform):
    """The graph of `build` after the polls of its shards; its steps keep their names."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self._build = build

    def expand(self, polls: beam.PCollection) -> beam.PCollection:
        self._build(polls)
        return polls


class Whole(beam.PTransform):
    """The graph of `build` with its source; its steps keep their names."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self._build = build

    def expand(self, pbegin: beam.pvalue.PBegin) -> beam.pvalue.PDone:
        self._build(pbegin)
        return beam.pvalue.PDone(pbegin.pipeline)


def close_branches() -> None:
    """End the threads of every stream of this process. Their sources are closed by `close_sources`."""
    while _RUNNING:
        _RUNNING.popitem()[1].stop()


def _polls_of(shards: tuple[BranchShard, ...]) -> BranchPolls:
    groups = tuple(each.shard.group for each in shards)
    polls = _RUNNING.get(groups)
    if polls is None:
        polls = _RUNNING[groups] = BranchPolls(shards, open_source, idle_seconds)
    return polls
