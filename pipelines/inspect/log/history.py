"""The history of one trajectory, from the log: its records in all topics, in causal order.

Little is read: the prompt is found by bisection, and each later record is searched for from the timestamp of the one
before it. Clocks differ between machines, so each search begins `SLACK_MS` earlier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from infra.kafka.offset_span import Edge, OffsetSpan
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic, partition_ranges, resolve_span
from infra.kafka.topic_reader import first_offset
from pipelines.inspect.log.chunks import read_chunks
from pipelines.inspect.log.matching import MatchingRecord, matching, may_match
from schemas.block_codec import decode_as_block
from schemas.codec import Headers, UndecodableRecord
from schemas.identity import TrajectoryKey
from schemas.records import Experience, Prompt, Trajectory
from schemas.topics import (
    BATCHES,
    EVAL_PROMPTS,
    EXPERIENCES,
    INBOX,
    PLANS,
    PROGRESS,
    PROMPTS,
    RELAY,
    SETTLED,
    TRAJECTORIES,
    Topic,
    partition_of,
)

SLACK_MS = 60_000


@dataclass(frozen=True)
class TrajectoryHistory:
    """The records about a trajectory, in causal order."""

    events: list[MatchingRecord]

    def first(self, kind: type) -> MatchingRecord | None:
        """The first record of class `kind`, or None."""
        return next((event for event in self.events if isinstance(event.record, kind)), None)

    @property
    def trajectory(self) -> Trajectory | None:
        """The finished trajectory, of an imported one that of its experience; None before it has finished."""
        finished = self.first(Trajectory)
        if finished is not None:
            return finished.record
        scored = self.first(Experience)
        return None if scored is None else scored.record.trajectory


class _TrajectorySearch:
    """Searches the topics of a run for the records of one trajectory."""

    def __init__(self, client: ClientProperties, run: str, key: TrajectoryKey) -> None:
        self.client, self.run, self.key = client, run, key

    def prompt(self) -> MatchingRecord | None:
        """Its prompt, found by bisection, as prompt numbers rise."""
        topic = EVAL_PROMPTS if self.key.purpose == "evaluation" else PROMPTS
        try:
            place = first_offset(self.client, topic.name(self.run), 0, _prompt_number, self.key.number)
        except UnknownTopic:
            return None
        return (
            None
            if place is None
            else next(self.records_of(topic, OffsetSpan(Edge("offset", place), Edge("offset", place + 1))), None)
        )

    def records_of(self, topic: Topic, span: OffsetSpan, *, own_partition: bool = False) -> Iterator[MatchingRecord]:
        """Its records in `span` of `topic`; `own_partition`: only in its group's partition."""
        name = topic.name(self.run)
        try:
            numbers = None
            if own_partition:
                numbers = [partition_of(self.key.number, len(partition_ranges(self.client, name)))]
            ranges = resolve_span(self.client, name, span, numbers)
        except UnknownTopic:
            return
        for chunk in read_chunks(self.client, topic, name, ranges, wanted=may_match(self.key)):
            yield from matching(chunk, self.key)

    def versions_trained_on(self, batch: int) -> Iterator[MatchingRecord]:
        """The versions trained on batch number `batch`: several if the trainer restarted from a checkpoint."""
        name = RELAY.name(self.run)
        try:
            ranges = partition_ranges(self.client, name)
        except UnknownTopic:
            return
        for chunk in read_chunks(self.client, RELAY, name, ranges):
            for at, block in enumerate(chunk.decoded_records):
                if isinstance(block, str):
                    continue
                (manifest,) = block.records()
                if batch in manifest.batches and batch not in manifest.untrained_batches:
                    records = chunk.records
                    yield MatchingRecord(
                        RELAY.short_name, records.partition, records.offsets[at], records.timestamps[at], manifest
                    )


def history_of(client: ClientProperties, run: str, key: TrajectoryKey) -> Iterator[list[MatchingRecord]]:
    """The history of trajectory `key` of `run`, part by part, in causal order."""
    search = _TrajectorySearch(client, run, key)
    finish_time = None
    if key.purpose != "imported":  # an imported one begins as an experience
        prompt = search.prompt()
        prompt_time = prompt.timestamp if prompt else None
        if prompt:
            yield [prompt]
        finished = next(search.records_of(TRAJECTORIES, _between(prompt_time), own_partition=True), None)
        finish_time = finished.timestamp if finished else None
        span = _between(prompt_time, finish_time)
        between = [event for topic in (INBOX, PROGRESS, PLANS) for event in search.records_of(topic, span)]
        yield sorted(between, key=lambda event: (event.timestamp, event.topic, event.offset))
        if finished is None:
            return
        yield [finished]
    scored = next(search.records_of(EXPERIENCES, _between(finish_time), own_partition=True), None)
    if scored is None:
        return
    yield [scored]
    settled = next(search.records_of(SETTLED, _between(scored.timestamp)), None)
    if settled is None:
        return
    if settled.record.batch is None:
        yield [settled]
        return
    batched = [settled, *islice(search.records_of(BATCHES, _between(settled.timestamp)), 1)]
    yield sorted(batched, key=lambda event: event.timestamp)  # one transaction writes both
    yield [*search.versions_trained_on(settled.record.batch)]


def _between(begin_ms: int | None, end_ms: int | None = None) -> OffsetSpan:
    """The offsets of the records from `begin_ms` to `end_ms` (Unix milliseconds; None: no limit).

    They include those of some time before and after, because the clocks of machines differ.
    """
    begin = Edge("beginning", 0) if begin_ms is None else Edge("time", begin_ms - SLACK_MS)
    return OffsetSpan(begin, None if end_ms is None else Edge("time", end_ms + SLACK_MS))


def _prompt_number(value: bytes | None, headers: Headers) -> int | None:
    try:
        block = decode_as_block(value, headers)
    except UndecodableRecord:
        return None
    return block.column("number")[0].as_py() if block.kind is Prompt else None
