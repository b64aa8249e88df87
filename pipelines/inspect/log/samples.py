"""Selects scored samples from a run's topic `experiences`: whole groups, or the answers of two versions to a question.

A first pass reads few columns and ranks the groups; only the chosen ones are converted to records. Memory grows with
the number of groups that are incomplete at a time, not with the length of the topic.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import PartitionRange, partition_ranges
from operators.export.columns import columns_of
from pipelines.inspect.log.chunks import read_chunks
from schemas.block import Block
from schemas.identity import Purpose, parse_trajectory_id
from schemas.records import Experience, PolicyVersion, Prompt
from schemas.topics import EXPERIENCES

FIRST_WINDOW = 64
"""How many of the newest offsets of each partition are read first; then four times as many, until enough are found."""
SampleOrder = Literal["newest", "oldest", "best", "worst"]
_COLUMNS = {column.field.name: column.make for column in columns_of(Experience)}


@dataclass(frozen=True)
class SampleFilter:
    """Which samples: of these purposes, tasks, versions and groups (`p12`). Empty: of all."""

    purpose: Purpose | None = None
    task: str | None = None
    versions: frozenset[PolicyVersion] = frozenset()
    groups: frozenset[str] = frozenset()

    def rows(self, block: Block) -> list[int]:
        """The indices of the rows of `block`, experiences, that it selects."""
        batch = block.batch
        mask = pa.array([True] * len(block))
        for name, wanted in (("purpose", self.purpose), ("task", self.task)):
            if wanted is not None:
                mask = pc.and_(mask, pc.equal(_COLUMNS[name](batch), wanted))
        if self.groups:
            mask = pc.and_(mask, pc.is_in(_COLUMNS["group_id"](batch), value_set=pa.array(sorted(self.groups))))
        if self.versions:
            pairs = zip(_COLUMNS["policy_epoch"](batch), _COLUMNS["policy_version"](batch), strict=True)
            wanted_pairs = {(each.epoch, each.number) for each in self.versions}
            of_versions = [(epoch.as_py(), number.as_py()) in wanted_pairs for epoch, number in pairs]
            mask = pc.and_(mask, pa.array(of_versions, pa.bool_()))
        return [int(row) for row in pc.indices_nonzero(mask).to_pylist()]


@dataclass(frozen=True)
class SampleGroup:
    """The scored samples of one prompt, by member; there may be fewer than the prompt asks for."""

    prompt: Prompt
    samples: tuple[Experience, ...]

    @property
    def reward(self) -> float:
        """The mean reward."""
        return fmean(each.reward for each in self.samples)


@dataclass(frozen=True)
class AnswerChange:
    """The answers of an older and a newer version to the same question."""

    before: SampleGroup
    after: SampleGroup

    @property
    def change(self) -> float:
        """The change of the mean reward."""
        return self.after.reward - self.before.reward


class SampleComparison(NamedTuple):
    """The questions that both versions answered, those with the largest change of reward first."""

    versions: tuple[PolicyVersion, PolicyVersion]
    changes: list[AnswerChange]


def find_groups(
    client: ClientProperties, run: str, wanted: SampleFilter, order: SampleOrder, count: int
) -> list[SampleGroup]:
    """The first `count` groups of `wanted` in `order`; best and worst: by mean reward, then the newest.

    With best and worst the samples of a group are in that order, too.

    Raises UnknownTopic.
    """
    held = partition_ranges(client, EXPERIENCES.name(run))
    ranking = _Ranking(order, count)
    for ranges in _windows(held) if order == "newest" and not wanted.groups else [held]:
        ranking = _Ranking(order, count)
        for rows in _rows(client, run, ranges, wanted):
            ranking.add(rows)
        if ranking.is_complete:
            break
    groups = _read_groups(client, run, wanted, ranking.chosen())
    if order not in ("best", "worst"):
        return groups
    by_reward = [sorted(group.samples, key=lambda each: each.reward, reverse=order == "best") for group in groups]
    return [replace(group, samples=tuple(samples)) for group, samples in zip(groups, by_reward, strict=True)]


def groups_at(client: ClientProperties, run: str, wanted: SampleFilter, share: float) -> list[SampleGroup]:
    """The first whole group from `share` (0 to 1) of the longest partition on, or none. Raises UnknownTopic."""
    held = partition_ranges(client, EXPERIENCES.name(run))
    number, whole = max(held.items(), key=lambda item: item[1].end - item[1].beginning)
    start = whole.beginning + int((whole.end - whole.beginning) * share)
    ranking = _Ranking("oldest", 1)
    for rows in _rows(client, run, {number: PartitionRange(start, whole.end)}, wanted):
        ranking.add(rows)
        if ranking.is_complete:
            break
    return _read_groups(client, run, wanted, ranking.chosen())


def compare_versions(
    client: ClientProperties, run: str, wanted: SampleFilter, versions: tuple[PolicyVersion, PolicyVersion] | None
) -> SampleComparison | None:
    """The same questions under two versions, by default the first and the last that `wanted` finds.

    Questions are the same if task, text and sampling are; if there are greedy answers, only these count. None: the
    samples of `wanted` are of fewer than two versions. Raises UnknownTopic.
    """
    pair = versions or _first_and_last(client, run, wanted)
    if pair is None:
        return None
    samples: dict[PolicyVersion, dict[tuple[str, str, bool], dict[str, Experience]]] = {each: {} for each in pair}
    selected = replace(wanted, versions=frozenset(pair))
    for rows in _rows(client, run, partition_ranges(client, EXPERIENCES.name(run)), selected):
        for experience in rows.block.take(rows.rows).records():
            trajectory = experience.trajectory
            prompt, version = trajectory.prompt, trajectory.policy_version
            question = (prompt.task, prompt.text, prompt.sampling.temperature == 0)
            samples[version].setdefault(question, {}).setdefault(trajectory.trajectory_id, experience)
    common = samples[pair[0]].keys() & samples[pair[1]].keys()
    if any(greedy for *_, greedy in common):
        common = {question for question in common if question[2]}
    changes = [AnswerChange(*(_group(samples[each][question].values()) for each in pair)) for question in common]
    changes.sort(key=lambda each: (-abs(each.change), each.before.prompt.number))
    return SampleComparison(pair, changes)


def _first_and_last(
    client: ClientProperties, run: str, wanted: SampleFilter
) -> tuple[PolicyVersion, PolicyVersion] | None:
    """The oldest and the newest version with samples; None if there are fewer than two."""
    found: set[PolicyVersion] = set()
    for rows in _rows(client, run, partition_ranges(client, EXPERIENCES.name(run)), wanted):
        epochs, numbers = (_COLUMNS[name](rows.block.batch).to_pylist() for name in ("policy_epoch", "policy_version"))
        found |= {PolicyVersion(epochs[row], numbers[row]) for row in rows.rows if epochs[row] is not None}
        found = {min(found), max(found)} if found else found
    return (min(found), max(found)) if len(found) > 1 else None


class _Rows(NamedTuple):
    """The selected `rows` of a block of experiences, and the partition and the offset of each of its rows."""

    block: Block
    rows: list[int]
    partition: int
    offsets: list[int]


class _Place(NamedTuple):
    """A group and the offsets of its samples: from `first` to `last` of `partition`."""

    group: str
    partition: int
    first: int
    last: int


def _rows(
    client: ClientProperties, run: str, ranges: Mapping[int, PartitionRange], wanted: SampleFilter
) -> Iterator[_Rows]:
    for chunk in read_chunks(client, EXPERIENCES, EXPERIENCES.name(run), ranges):
        block = chunk.decoded.blocks.get(Experience)
        if block is not None and (rows := wanted.rows(block)):
            numbers = chunk.record_numbers(Experience)
            yield _Rows(block, rows, chunk.records.partition, [chunk.records.offsets[at] for at in numbers])


def _windows(held: Mapping[int, PartitionRange]) -> Iterator[Mapping[int, PartitionRange]]:
    """Ever larger ranges that end where `held` ends; the last one is `held`."""
    back, longest = FIRST_WINDOW, max(each.end - each.beginning for each in held.values())
    while back < longest:
        yield {number: PartitionRange(max(each.beginning, each.end - back), each.end) for number, each in held.items()}
        back *= 4
    yield held


class _Ranking:
    """The first `count` groups in `order`; groups with all their samples come before others."""

    def __init__(self, order: SampleOrder, count: int) -> None:
        self._order, self._count = order, count
        self._best: list[tuple[tuple[bool, float, int], _Place]] = []
        self._open: dict[str, tuple[list[float], int, _Place]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether `count` groups with all their samples were found."""
        return len(self._best) >= self._count

    def add(self, rows: _Rows) -> None:
        """Add the samples of `rows`."""
        names = ("group_id", "group_size", "reward", "scored_at")
        columns = [_COLUMNS[name](rows.block.batch).to_pylist() for name in names]
        for row in rows.rows:
            group, size, reward, scored_at = (column[row] for column in columns)
            at, offset = int(scored_at.timestamp() * 1000), rows.offsets[row]
            rewards, newest, place = self._open.get(group, ([], 0, _Place(group, rows.partition, offset, offset)))
            rewards.append(reward)
            place = place._replace(first=min(place.first, offset), last=max(place.last, offset))
            self._open[group] = (rewards, max(newest, at), place)
            if len(rewards) >= size:
                self._rank(self._best, *self._open.pop(group), complete=True)

    def chosen(self) -> list[_Place]:
        """The places of the groups, the first in order first."""
        best = list(self._best)
        for rewards, newest, place in self._open.values():
            self._rank(best, rewards, newest, place, complete=False)
        return [place for _, place in sorted(best, reverse=True)]

    def _rank(
        self,
        best: list[tuple[tuple[bool, float, int], _Place]],
        rewards: list[float],
        newest: int,
        place: _Place,
        *,
        complete: bool,
    ) -> None:
        value = {"newest": 0.0, "oldest": -newest, "best": fmean(rewards), "worst": -fmean(rewards)}[self._order]
        heapq.heappush(best, ((complete, value, newest), place))
        if len(best) > self._count:
            heapq.heappop(best)


def _read_groups(
    client: ClientProperties, run: str, wanted: SampleFilter, places: Iterable[_Place]
) -> list[SampleGroup]:
    """The groups at `places`, in their order."""
    spans: dict[int, list[int]] = defaultdict(list)
    order = [place.group for place in places]
    for place in places:
        spans[place.partition] += (place.first, place.last)
    ranges = {number: PartitionRange(min(offsets), max(offsets) + 1) for number, offsets in spans.items()}
    found: dict[str, dict[str, Experience]] = {group: {} for group in order}
    if not found:
        return []
    for rows in _rows(client, run, ranges, replace(wanted, groups=frozenset(order))):
        for experience in rows.block.take(rows.rows).records():
            trajectory = experience.trajectory
            found[trajectory.prompt.prompt_id].setdefault(trajectory.trajectory_id, experience)
    return [_group(found[group].values()) for group in order if found[group]]


def _group(samples: Iterable[Experience]) -> SampleGroup:
    ordered = sorted(samples, key=lambda each: parse_trajectory_id(each.trajectory.trajectory_id))
    return SampleGroup(ordered[0].trajectory.prompt, tuple(ordered))


def count_changes(changes: Iterable[AnswerChange]) -> Counter[str]:
    """The number of questions with a better, a worse, and an equal reward."""
    return Counter("better" if each.change > 0 else "worse" if each.change < 0 else "equal" for each in changes)
