"""The table of episodes: records in any order between topics, restarts, and what a restart reads again."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from gateway_harness import LetterTokenizer
from record_factories import prompt, trajectory

from infra.models.conversations import ConversationFormat
from operators.gateway import episode_table
from operators.gateway.chat_api import response_message
from operators.gateway.episode_table import EpisodeTable
from operators.io.elements import PartitionKey, ReceivedRecord
from schemas.columns import flags, floats, token_ids
from schemas.records import Assignment, PolicyVersion, Progress, Response, TurnEnded, TurnRequest, VersionSpan

PLACES = [PartitionKey("inbox", 0), PartitionKey("progress", 0), *(PartitionKey("trajectories", p) for p in (0, 1))]


class Log:
    """The three topics that a gateway reads; every topic is in order, topics among each other are not."""

    def __init__(self) -> None:
        self.topics: dict[PartitionKey, list[Any]] = {place: [] for place in PLACES}

    def episode(self, name: str, of: Any, member: int, start: int = 0) -> None:
        """Assign an episode and play two turns of it."""
        self.write(0, Assignment(of, member, 1, 1, 0, 1, None, None, 0))
        for number in range(2):
            at = start + 3 * number
            request = TurnRequest(
                name, 1, 0, 1, f"{name}-{number}", f"d{number}", at, (), token_ids([7]), 8, (), "[]", "[]", False, 0
            )
            gained = Response(token_ids([7, 8, 9]), floats([0, -1, -1]), flags([False, True, True]))
            span = (VersionSpan(PolicyVersion(1, 0), 3),)
            self.write(0, request)
            self.write(1, Progress(name, 1, 1, 0, 1, at, gained, span, None, 0, 0))
            self.write(1, TurnEnded(name, 1, 0, 1, f"{name}-{number}", at, at + 3, "stop", None, 0))

    def write(self, place: int, record: Any) -> None:
        self.topics[PLACES[place]].append(record)

    def read(self, since: dict[PartitionKey, int], seed: int) -> list[ReceivedRecord]:
        """The records from the offsets `since` on, in a random order of topics."""
        rng, at = random.Random(seed), {place: since.get(place, 0) for place in PLACES}
        found = []
        while ready := [place for place in PLACES if at[place] < len(self.topics[place])]:
            place = rng.choice(ready)
            found.append(ReceivedRecord(*place, at[place], self.topics[place][at[place]]))
            at[place] += 1
        return found

    def ends(self) -> dict[PartitionKey, int]:
        return {place: len(records) for place, records in self.topics.items()}


HOSTILE = ("[" * 5000, '{"name": ["add"]}', "<tool_call>{" * 5000, '{"name": "add", "arguments": "' + "[" * 5000 + '"}')


@pytest.mark.parametrize("text", HOSTILE)
def test_response_of_a_hostile_model_is_recorded(text: str) -> None:
    """A response that ended the gateway would end it again at each start, since it is in the log."""
    form = ConversationFormat(LetterTokenizer(), plain=False)
    found = EpisodeTable(2, partial(response_message, form), lambda names: None)
    tools = '[{"type": "function", "function": {"name": "add"}}]'
    tokens = LetterTokenizer().encode(text)
    asked = TurnRequest("p0.0", 1, 0, 1, "a", "d", 0, (), token_ids([107]), 8, (), "[]", tools, False, 0)
    gained = Response(token_ids([107, *tokens]), floats([-1.0] * (len(tokens) + 1)), flags([True] * (len(tokens) + 1)))
    span = (VersionSpan(PolicyVersion(1, 0), len(tokens) + 1),)
    records = [
        Assignment(prompt(0, 1, environment="agent"), 0, 1, 1, 0, 1, None, None, 0),
        asked,
        Progress("p0.0", 1, 1, 0, 1, 0, gained, span, None, 0, 0),
        TurnEnded("p0.0", 1, 0, 1, "a", 0, len(tokens) + 1, "stop", None, 0),
    ]
    found.fold([ReceivedRecord("inbox", 0, offset, record) for offset, record in enumerate(records)])
    episode = found.get("p0.0")
    assert episode is not None
    assert len(episode.recorded.responses) == 1


def test_end_of_a_turn_before_its_response_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    log, it = Log(), table()
    log.episode("p0.0", prompt(0, 1, environment="agent"), 0)
    assigned, asked, *_ = log.topics[PLACES[0]]
    log.topics[PLACES[0]] = [assigned, asked]
    progress, ended, *_ = log.topics[PLACES[1]]
    log.topics[PLACES[1]] = [progress, replace(ended, stop=0), ended]
    it.fold([ReceivedRecord(*place, at, record) for place in PLACES for at, record in enumerate(log.topics[place])])
    assert "the end of turn p0.0-0 of episode p0.0, token 0, is before its response, which begins at 1" in caplog.text
    episode = it.get("p0.0")
    assert episode is not None
    assert [turn.ended for turn in episode.turns.values()] == [ended]
    assert len(episode.recorded.responses) == 1


def table(state: dict[str, int] | None = None) -> EpisodeTable:
    return EpisodeTable(
        2, lambda turn, tokens: {"role": "assistant", "content": str(tokens)}, lambda names: None, state
    )


@pytest.mark.parametrize("seed", range(8))
def test_order_between_topics_does_not_matter(seed: int) -> None:
    log, of = Log(), prompt(0, 2, environment="agent")
    log.episode("p0.0", of, 0)
    log.episode("p0.1", of, 1)
    it = table()
    it.fold(log.read({}, seed))
    assert it.names() == ["p0.0", "p0.1"]
    for name in it.names():
        episode = it.get(name)
        assert episode is not None
        assert it.length(name) == 6
        assert episode.pending is None
        assert [turn.ended is not None for turn in episode.turns.values()] == [True, True]
        assert len(episode.recorded.responses) == 2
        assert it.segments(name, "last", 1000).segments[0].ranges[0].start == 3


@pytest.mark.parametrize("seed", range(8))
def test_restart_continues_from_its_low_water_mark(seed: int) -> None:
    log, first, other = Log(), prompt(0, 2, environment="agent"), prompt(1, 1, environment="agent")
    log.episode("p0.0", first, 0)
    log.episode("p0.1", first, 1)
    log.episode("p1.0", other, 0)
    log.write(2, trajectory(first, 0))
    log.write(3, trajectory(other, 0))
    before = table()
    before.fold(log.read({}, seed))
    assert before.names() == ["p0.1"]
    low_water = before.low_water(log.ends())
    assert low_water[PLACES[3]] == 1, "the group of p1 has finished"
    again = table(before.state())
    again.fold(log.read(low_water, seed))
    assert again.names() == ["p0.1"], "an episode that has finished is not followed again"
    assert again.length("p0.1") == 6
    assert [again.has_finished(name) for name in ("p0.0", "p0.1", "p1.0")] == [True, False, True]
    log.write(2, trajectory(first, 1))
    before.fold(log.read(log.ends() | {PLACES[2]: 1}, seed))
    assert before.low_water(log.ends()) == log.ends(), "nothing is read again once all have finished"


@pytest.mark.parametrize("seed", range(8))
def test_restart_after_any_record_loses_none(seed: int) -> None:
    log, of = Log(), prompt(0, 2, environment="agent")
    log.episode("p0.0", of, 0)
    log.episode("p0.1", of, 1)
    records = log.read({}, seed)
    for read in range(len(records)):
        before = table()
        before.fold(records[:read])
        positions = dict.fromkeys(PLACES, 0)
        for received in records[:read]:
            positions[PartitionKey(received.topic, received.partition)] = received.offset + 1
        again = table(before.state())
        again.fold(log.read(before.low_water(positions), seed))
        assert [(name, again.length(name)) for name in again.names()] == [("p0.0", 6), ("p0.1", 6)], read


def test_record_without_an_assignment_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign one would make each restart longer."""
    monkeypatch.setattr(episode_table, "MAX_EARLY", 3)
    it, log, of = table(), Log(), prompt(0, 9)
    log.write(1, TurnEnded("p99.0", 1, 0, 1, "p99.0-0", 0, 3, "stop", None, 0))
    for member in range(4):
        log.write(0, Assignment(of, member, 1, 1, 0, 1, None, None, 0))
    records = sorted(log.read({}, 0), key=lambda received: received.topic == "inbox")
    it.fold(records[:4])
    assert it.low_water(log.ends())[PLACES[1]] == 0
    it.fold(records[4:])
    assert it.low_water(log.ends()) == log.ends()


@pytest.mark.parametrize("progress_first", [False, True])
def test_records_of_other_trajectories_are_not_kept(progress_first: bool) -> None:
    """Of a mixture: their progress was read again at each start, until they finished."""
    it, log, of = table(), Log(), prompt(0, 1)
    log.write(0, Assignment(of, 0, 1, 1, 0, 1, None, None, 0))
    gained = Response(token_ids([7]), floats([-1]), flags([True]))
    log.write(1, Progress("p0.0", 1, 1, 0, 1, 0, gained, (VersionSpan(PolicyVersion(1, 0), 1),), None, 0, 0))
    it.fold(sorted(log.read({}, 0), key=lambda received: (received.topic == "inbox") == progress_first))
    assert it.low_water(log.ends()) == log.ends()
    log.write(2, trajectory(of, 0))
    it.fold(log.read({PLACES[0]: 1, PLACES[1]: 1}, 0))
    assert not it._others


def test_order_from_within_another_turn_is_forgotten_at_its_end() -> None:
    """A gateway that reads tokens of a turn before its request takes their end for the end of the episode so far."""

    def request(turn: str, start: int) -> TurnRequest:
        return TurnRequest("p0.0", 1, 0, 1, turn, turn, start, (), token_ids([7]), 8, (), "[]", "[]", False, 0)

    gained = Response(token_ids([7, 8]), floats([0, -1]), flags([False, True]))
    records = (
        (0, Assignment(prompt(0, 1, environment="agent"), 0, 1, 1, 0, 1, None, None, 0)),
        (1, Progress("p0.0", 1, 1, 0, 1, 0, gained, (VersionSpan(PolicyVersion(1, 0), 2),), None, 0, 0)),
        (0, request("second", 2)),
        (0, request("first", 0)),
        (1, TurnEnded("p0.0", 1, 0, 1, "first", 0, 3, "stop", None, 0)),
    )
    it, offsets = table(), [0, 0]
    for place, record in records:
        it.fold([ReceivedRecord(*PLACES[place], offsets[place], record)])
        offsets[place] += 1
    episode = it.get("p0.0")
    assert episode is not None
    assert episode.pending is None
