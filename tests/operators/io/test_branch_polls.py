"""Polls of several shards merged into one stream: order, backpressure, stop and errors."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from scripted_sessions import CONFIG
from waiting import until

from infra.kafka.session import SessionLost
from operators.io.branch_polls import BranchPoll, BranchPolls, BranchShard
from operators.io.elements import Polled
from operators.io.source import ShardSource

FIRST, SECOND = (BranchShard(name, replace(CONFIG, pipeline=name)) for name in ("first", "second"))
GROUPS = [each.shard.group for each in (FIRST, SECOND)]


@dataclass
class Source:
    """Numbers its polls; `limit` polls are returned, the next one waits until `released`, or raises `error`."""

    group: str
    limit: int = 1_000_000
    error: BaseException | None = None
    polls: int = 0
    waited: list[float] = field(default_factory=list)
    waiting: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def next(self, wait: float) -> Polled:
        self.waited.append(wait)
        if self.polls == self.limit:
            if self.error is not None:
                raise self.error
            self.waiting.set()
            self.released.wait(30)
        self.polls += 1
        return self._poll()

    def final_poll(self) -> Polled:
        return replace(self._poll(), last=True)

    def _poll(self) -> Polled:
        return Polled(self.group, self.polls, (), (), {}, True)


class Stream:
    """The merged stream of two sources."""

    def __init__(self, first: Source, second: Source) -> None:
        self.sources = {first.group: first, second.group: second}
        self.busy: set[str] = set()
        self.polls = BranchPolls(
            (FIRST, SECOND),
            lambda shard: cast("ShardSource", self.sources[shard.group]),
            lambda group: 0.0 if group in self.busy else math.inf,
        )

    def take(self, count: int) -> list[BranchPoll]:
        """The next elements; each is folded before the next is taken."""
        taken = []
        while len(taken) < count:
            if (found := self.polls.next()) is not None:
                taken.append(found)
                self.polls.mark_folded(found.group)
        return taken

    def take_until(self, group: str, times: int = 1) -> None:
        """Take elements until `times` are of `group`, however slowly its thread runs."""
        while times:
            times -= self.take(1)[0].group == group

    def close(self) -> None:
        for source in self.sources.values():
            source.released.set()
        self.polls.stop()


@pytest.fixture
def opened() -> Iterator[list[Stream]]:
    streams: list[Stream] = []
    yield streams
    for stream in streams:
        stream.close()


def stream_of(opened: list[Stream], **first: Any) -> Stream:
    opened.append(Stream(Source(GROUPS[0], **first), Source(GROUPS[1])))
    return opened[-1]


def test_branch_polls_of_a_shard_arrive_in_order_for_its_branch(opened: list[Stream]) -> None:
    taken = stream_of(opened).take(20)
    for branch, group in zip(("first", "second"), GROUPS, strict=True):
        mine = [each for each in taken if each.branch == branch]
        assert {(each.group, each.element.group) for each in mine} == {(group, group)}
        assert [each.element.start for each in mine] == list(range(1, len(mine) + 1))


def test_branch_polls_continue_while_another_shard_waits(opened: list[Stream]) -> None:
    stream = stream_of(opened, limit=0)
    assert [each.branch for each in stream.take(5)] == ["second"] * 5


def test_shard_polls_again_only_after_its_element_is_folded(opened: list[Stream]) -> None:
    stream = stream_of(opened)
    held = stream.polls.next()
    assert held is not None
    other = [group for group in GROUPS if group != held.group]
    assert {each.group for each in stream.take(10)} == set(other)
    assert stream.sources[held.group].polls == 1
    stream.polls.mark_folded(held.group)
    stream.take_until(held.group)


def test_busy_shard_polls_without_waiting(opened: list[Stream]) -> None:
    stream = stream_of(opened)
    stream.busy.add(GROUPS[0])
    stream.take_until(GROUPS[0], times=3)  # the first polls may have begun before
    stream.take_until(GROUPS[1])
    assert stream.sources[GROUPS[0]].waited[-1] == 0.0
    assert all(stream.sources[GROUPS[1]].waited)


def test_stopped_stream_returns_the_elements_handed_over(opened: list[Stream]) -> None:
    stream = stream_of(opened, limit=1)
    found = stream.take(1)
    while not any(each.branch == "first" for each in found):
        found += stream.take(1)
    stream.sources[GROUPS[0]].waiting.wait(30)
    stream.sources[GROUPS[0]].released.set()
    left = stream.polls.stop()
    for group in GROUPS:
        seen = [each.element.start for each in (*found, *left) if each.group == group]
        assert seen == list(range(1, stream.sources[group].polls + 1))  # no poll is lost, whose offsets are counted
    assert [each.element.last for each in stream.polls.final_polls()] == [True, True]
    assert not any(thread.name.startswith("poll laminar.run") for thread in threading.enumerate())


def test_error_of_a_source_is_raised_in_the_stream(opened: list[Stream]) -> None:
    stream = stream_of(opened, limit=0, error=SessionLost("gone"))
    with pytest.raises(SessionLost, match="gone"):
        until(lambda: not stream.take(1))  # the other source has elements without end


def test_error_of_a_source_does_not_prevent_the_stop(opened: list[Stream]) -> None:
    stream = stream_of(opened, limit=0, error=SessionLost("gone"))
    assert all(each.group == GROUPS[1] for each in stream.polls.stop())
