"""One trajectory's whole life, from the log alone: what every topic says of it, in the order of its story.

Little is read: its prompt's place is found by looking, and what happened after it is looked for from the time of the
one before on. Clocks differ between machines, so it begins `SLACK_MS` earlier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from infra.kafka.offset_span import Edge, OffsetSpan
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic, partition_ranges, resolve_span
from infra.kafka.record_batches import Headers
from infra.kafka.searching import first_offset
from pipelines.inspect.log.chunks import read_chunks
from pipelines.inspect.log.matching import MatchingRecord, matching, may_match
from schemas.block_codec import decode_as_block
from schemas.codec import UndecodableRecord
from schemas.identity import TrajectoryKey
from schemas.records import Prompt
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
class History:
    """What the log says of a trajectory, in the order of its story."""

    events: list[MatchingRecord]

    def first(self, kind: type) -> MatchingRecord | None:
        """The first record of class `kind`, None where there is none."""
        return next((event for event in self.events if isinstance(event.record, kind)), None)


class _Log:
    """The topics of a run, from some time on, for what concerns one trajectory."""

    def __init__(self, client: ClientProperties, run: str, key: TrajectoryKey) -> None:
        self.client, self.run, self.key = client, run, key

    def prompt(self) -> MatchingRecord | None:
        """Its prompt, found by looking: their numbers rise."""
        topic = EVAL_PROMPTS if self.key.purpose == "evaluation" else PROMPTS
        try:
            place = first_offset(self.client, topic.name(self.run), 0, _prompt_number, self.key.number)
        except UnknownTopic:
            return None
        return None if place is None else next(self.since(topic, None, first=place, last=place + 1), None)

    def since(
        self,
        topic: Topic,
        moment: int | None,
        until: int | None = None,
        *,
        own: bool = False,
        first: int | None = None,
        last: int | None = None,
    ) -> Iterator[MatchingRecord]:
        """What `topic` says of it from `moment` to `until` (Unix milliseconds), or between two offsets.

        `own`: only its group's partition.
        """
        name = topic.name(self.run)
        try:
            numbers = [partition_of(self.key.number, len(partition_ranges(self.client, name)))] if own else None
            begin = Edge("beginning", 0) if moment is None else Edge("time", moment - SLACK_MS)
            end = None if until is None else Edge("time", until + SLACK_MS)
            if first is not None and last is not None:
                begin, end = Edge("offset", first), Edge("offset", last)
            ranges = resolve_span(self.client, name, OffsetSpan(begin, end), numbers)
        except UnknownTopic:
            return
        for chunk in read_chunks(self.client, topic, name, ranges, wanted=may_match(self.key)):
            yield from matching(chunk, self.key)

    def version_after(self, batch: int) -> Iterator[MatchingRecord]:
        """The versions that batch number `batch` went into: several where the trainer began anew from a checkpoint."""
        name = RELAY.name(self.run)
        try:
            ranges = partition_ranges(self.client, name)
        except UnknownTopic:
            return
        for chunk in read_chunks(self.client, RELAY, name, ranges):
            for at, block in enumerate(chunk.found):
                if isinstance(block, str):
                    continue
                (manifest,) = block.records()
                if batch in manifest.batches and batch not in manifest.untrained_batches:
                    records = chunk.records
                    yield MatchingRecord(
                        RELAY.short_name, records.partition, records.offsets[at], records.timestamps[at], manifest
                    )


def history_of(client: ClientProperties, run: str, key: TrajectoryKey) -> Iterator[list[MatchingRecord]]:
    """The life of trajectory `key` of `run`, part by part, in the order of its story."""
    log = _Log(client, run, key)
    prompt = log.prompt()
    asked = prompt.timestamp if prompt else None
    if prompt:
        yield [prompt]
    finished = next(log.since(TRAJECTORIES, asked, own=True), None)
    ended = finished.timestamp if finished else None
    between = [event for topic in (INBOX, PROGRESS, PLANS) for event in log.since(topic, asked, ended)]
    yield sorted(between, key=lambda event: (event.timestamp, event.topic, event.offset))
    if finished is None:
        return
    yield [finished]
    scored = next(log.since(EXPERIENCES, finished.timestamp, own=True), None)
    if scored is None:
        return
    yield [scored]
    settled = next(log.since(SETTLED, scored.timestamp), None)
    if settled is None:
        return
    yield [settled]
    if settled.record.batch is None:
        return
    yield [*islice(log.since(BATCHES, settled.timestamp), 1)]
    yield [*log.version_after(settled.record.batch)]


def _prompt_number(value: bytes | None, headers: Headers) -> int | None:
    try:
        block = decode_as_block(value, headers)
    except UndecodableRecord:
        return None
    return block.column("number")[0].as_py() if block.kind is Prompt else None
