"""ReadTopics: an unbounded, self-checkpointing source over the topics of each shard."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import apache_beam as beam
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.options.pipeline_options import FlinkRunnerOptions
from apache_beam.pipeline import AppliedPTransform
from apache_beam.runners.sdf_utils import RestrictionTrackerView
from apache_beam.transforms.window import TimestampedValue

from infra.runners.flink_slots import key_in_subtask, name_of_key
from infra.runners.releases import check_releases, installed
from infra.runners.stopping import AT_END, STOPPING
from operators.io.branch_polls import BranchShard
from operators.io.config import ShardConfig
from operators.io.elements import Polled, Restored
from operators.io.fold_records import idle_seconds, is_busy
from operators.io.poll_range import FOREVER, PollRange, slice_seconds
from operators.io.read_branches import WATERMARK, ReadBranches, timed
from operators.io.shards import close_shards
from operators.io.source import open_source


class _PollTopicsFn(beam.DoFn):
    def __init__(self, shards: Sequence[ShardConfig], slice_s: float) -> None:
        self._shards: Mapping[str, ShardConfig] = {shard.group: shard for shard in shards}
        self._slice_s = slice_s
        self.releases = installed()

    def setup(self) -> None:
        """Check the worker's release. In a worker's process nobody else closes the shards."""
        check_releases(self.releases)
        AT_END.add(close_shards)

    @beam.DoFn.unbounded_per_element()
    def process(
        self,
        element: str,
        tracker: RestrictionTrackerView = beam.DoFn.RestrictionParam(PollRange()),  # noqa: B008
        watermark: ManualWatermarkEstimator = WATERMARK,
    ) -> Iterator[Restored | Polled | TimestampedValue]:
        poll = tracker.current_restriction().start
        shard = self._shards[name_of_key(element)]
        source = open_source(shard)
        source.resume_at(poll)
        until = time.monotonic() + (shard.slice_s or self._slice_s)
        while time.monotonic() < until:
            if STOPPING.is_set() or (source.ended and not is_busy(shard.group)):
                final = source.final_poll() if tracker.try_claim(poll) else None
                if final is not None:
                    yield final
                tracker.try_claim(FOREVER - 1)  # claim the end of the range, so that the runner finishes cleanly
                return
            if not tracker.try_claim(poll):
                return
            poll += 1
            yield timed(source.next(wait=idle_seconds(shard.group)), watermark)
        tracker.defer_remainder()


class ReadTopics(beam.PTransform):
    """Reads the topics of `shards` from their restore offsets on.

    Each shard is one element of the source, with one consumer over all its topics and partitions, and the runner
    distributes them: Flink by their keys, other portable runners by a reshuffle. The embedded runner runs one element
    at a time, so there a single element polls all shards. Applied to polls that ReadBranches has read, it is the place
    in a branch where they arrive.
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
        runner = type(pbegin.pipeline.runner).__name__
        if runner == "FnApiRunner" and len(self.shards) > 1:
            return (pbegin | ReadBranches([BranchShard("polls", shard) for shard in self.shards]))["polls"]
        keys = [shard.group for shard in self.shards]
        if runner == "FlinkRunner":
            options = pbegin.pipeline.options.view_as(FlinkRunnerOptions)
            others = (each for each in sources_of(pbegin.pipeline.transforms_stack[0]) if each is not self)
            first = sum(len(each.shards) for each in others)
            keys = flink_keys(keys, first, options.parallelism, options.max_parallelism)
        poll = _PollTopicsFn(self.shards, slice_seconds(runner))
        shards = beam.Create(keys, reshuffle=runner == "PortableRunner")
        return pbegin | "shards" >> shards | "poll" >> beam.ParDo(poll)


def flink_keys(groups: Sequence[str], first: int, parallelism: int, key_groups: int) -> list[str]:
    """The keys of `groups` that Flink processes in consecutive subtasks from number `first` on.

    `parallelism` and `key_groups` are the options of the job; below 1 they are not set.
    """
    if parallelism <= 1:
        return list(groups)
    chosen = key_groups if key_groups > 0 else None
    return [key_in_subtask(group, first + at, parallelism, chosen) for at, group in enumerate(groups)]


def sources_of(part: AppliedPTransform) -> Iterator[ReadTopics]:
    """The sources in a part of a pipeline, in the order in which they were added."""
    if isinstance(part.transform, ReadTopics):
        yield part.transform
    for each in part.parts:
        yield from sources_of(each)
