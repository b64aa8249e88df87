"""A sink: whole emissions, in order, of this start alone; and what it does when they cannot be written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from scripted_sessions import CONFIG, INPUT, OUTPUT, ScriptedSession, ScriptedSessions, metric

import operators.io.sink
from infra.kafka.session import Note, SessionLost
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Emission, Output, PartitionKey
from operators.io.sink import ShardSink, SinkBroken, close_sinks, sink_of
from schemas.codec import decode, encode
from schemas.topics import METRICS


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> ScriptedSessions:
    scripted = ScriptedSessions()
    monkeypatch.setattr(operators.io.sink, "SESSIONS", scripted)
    return scripted


@pytest.fixture
def sink(sessions: ScriptedSessions) -> Iterator[ShardSink]:
    made = ShardSink(CONFIG)
    yield made
    made.close()


def emission(number: int, *steps: int, low: int = 0, ledger_from: int | None = None, start: int = 1) -> Emission:
    outputs = tuple(Output(METRICS, str(step), metric(step), 0) for step in steps)
    return Emission(
        CONFIG.group, start, number, outputs, Checkpoint({PartitionKey("metrics", 0): low}, ledger_from, {"n": 1})
    )


def written(session: ScriptedSession) -> list[list[int]]:
    return [[r.step for o in outputs for r in decode(o.value, o.headers)] for outputs, *_ in session.committed]


def test_outputs_low_water_ledger_and_marks_go_together(sessions: ScriptedSessions, sink: ShardSink) -> None:
    session = sessions.now = ScriptedSession(1, note=Note(0, {OUTPUT: 3}))
    for one in (emission(1, 7, 8, low=2, ledger_from=0), emission(2, 9, low=4, ledger_from=1)):
        sink.write(one)
        sink.flush()
    sink.write(emission(3, low=4, ledger_from=2))
    sink.flush()
    assert written(session) == [[7, 8], [9], []]
    assert [low for _, low, *_ in session.committed] == [{INPUT: 2}, {INPUT: 4}, {INPUT: 4}]
    assert [ledger for _, _, ledger, _ in session.committed] == [{OUTPUT: 3}, {OUTPUT: 10}, {OUTPUT: 20}]
    assert {tuple(state) for *_, state in session.committed} == {("n",)}


def test_what_waits_is_committed_as_one(sessions: ScriptedSessions, sink: ShardSink) -> None:
    session = sessions.now = ScriptedSession(1)
    under_way, release, commit = threading.Event(), threading.Event(), session.commit

    def slow(*arguments: object) -> dict[str, int]:
        under_way.set()
        release.wait(10)
        return commit(*arguments)  # type: ignore[arg-type]

    session.commit = slow  # type: ignore[method-assign]
    sink.write(emission(1, 1))
    under_way.wait(10)
    for number in (2, 3, 4):
        sink.write(emission(number, number, low=number))
    release.set()
    sink.flush()
    assert written(session) == [[1], [2, 3, 4]]
    assert session.committed[-1][1] == {INPUT: 4}


def test_sink_divides_what_is_too_large_for_one_transaction_by_emissions(
    sessions: ScriptedSessions, sink: ShardSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = sessions.now = ScriptedSession(1)
    monkeypatch.setattr("operators.io.sink.MAX_TRANSACTION_BYTES", 3 * len(encode(metric(1))[0]))
    under_way, release, commit = threading.Event(), threading.Event(), session.commit

    def slow(*arguments: object) -> dict[str, int]:
        under_way.set()
        release.wait(10)
        return commit(*arguments)  # type: ignore[arg-type]

    session.commit = slow  # type: ignore[method-assign]
    sink.write(emission(1, 1, 2, 3, 4))
    under_way.wait(10)
    for number in range(2, 8):
        sink.write(emission(number, number, low=number))
    release.set()
    sink.flush()
    assert written(session) == [[1, 2, 3, 4], [2, 3, 4], [5, 6, 7]]
    assert [offsets[INPUT] for _, offsets, *_ in session.committed] == [0, 4, 7]


def test_emissions_of_another_start_are_dropped(sessions: ScriptedSessions, sink: ShardSink) -> None:
    session = sessions.now = ScriptedSession(2)
    for one in (emission(1, 1, start=1), emission(1, 2, start=2), emission(2, 3, start=3)):
        sink.write(one)
        sink.flush()
    assert written(session) == [[2]]


def test_a_repeated_emission_is_dropped_and_a_missing_one_ends_the_session(
    sessions: ScriptedSessions, sink: ShardSink
) -> None:
    session = sessions.now = ScriptedSession(1)
    for number in (1, 2, 1, 2, 3):
        sink.write(emission(number, number))
        sink.flush()
    assert written(session) == [[1], [2], [3]]
    sink.write(emission(5, 5))
    sink.flush()
    sink.write(emission(4, 4))
    sink.flush()
    assert written(session) == [[1], [2], [3]]
    assert "emission 5 came after 3" in str(session.lost)


def test_offsets_alone_are_committed_when_they_are_news_and_due(sessions: ScriptedSessions) -> None:
    session = sessions.now = ScriptedSession(1)
    sink = ShardSink(CONFIG)
    for number, low in enumerate((1, 1, 1, 2), 1):
        sink.write(emission(number, low=low))
        sink.flush()
    sink.close()
    assert [low for _, low, *_ in session.committed] == [{INPUT: 1}, {INPUT: 2}]
    rare = ShardSink(replace(CONFIG, commit_s=100.0))
    rare.write(emission(1, 5, low=5))
    rare.flush()
    rare.write(emission(2, low=6))
    rare.flush()
    rare.close()
    assert [low for _, low, *_ in session.committed[2:]] == [{INPUT: 5}]


def test_what_a_lost_session_did_not_commit_is_never_sent_again(sessions: ScriptedSessions, sink: ShardSink) -> None:
    lost = ScriptedSession(1, failure=SessionLost("unknown outcome"))
    sessions.now = lost
    sink.write(emission(1, 1))
    sink.flush()
    successor = sessions.now = ScriptedSession(2)
    sink.write(emission(2, 2))
    sink.write(emission(1, 3, start=2))
    sink.flush()
    assert (written(lost), written(successor)) == ([], [[3]])


def test_a_broken_sink_says_so_and_its_session_ends(sessions: ScriptedSessions, sink: ShardSink) -> None:
    session = sessions.now = ScriptedSession(1, failure=ValueError("a record that does not fit"))
    sink.write(emission(1, 1))
    with pytest.raises(SinkBroken, match="does not fit"):
        sink.flush()
    with pytest.raises(SinkBroken):
        sink.write(emission(2, 2))
    assert isinstance(session.lost, SessionLost)


def test_a_full_sink_holds_the_step_back(
    sessions: ScriptedSessions, sink: ShardSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators.io.sink, "MAX_OUTPUTS", 4)
    session = sessions.now = ScriptedSession(1)
    under_way, release, commit = threading.Event(), threading.Event(), session.commit

    def slow(*arguments: object) -> dict[str, int]:
        under_way.set()
        release.wait(10)
        return commit(*arguments)  # type: ignore[arg-type]

    session.commit = slow  # type: ignore[method-assign]
    sink.write(emission(1, 1))
    under_way.wait(10)
    sink.write(emission(2, 2, 3, 4, 5))
    held = threading.Thread(target=sink.write, args=(emission(3, 6),))
    held.start()
    held.join(0.2)
    assert held.is_alive()
    release.set()
    held.join(10)
    sink.flush()
    assert written(session) == [[1], [2, 3, 4, 5], [6]]


def test_a_transaction_that_does_not_end_does_not_hang_the_pipeline(
    sessions: ScriptedSessions, sink: ShardSink
) -> None:
    session = sessions.now = ScriptedSession(1)
    release = threading.Event()
    session.commit = lambda *arguments: release.wait(10) and {}  # type: ignore[method-assign,return-value,assignment]
    sink.write(emission(1, 1))
    with pytest.raises(SinkBroken, match="has not ended"):
        sink.flush(0.05)
    release.set()


def test_closing_commits_what_was_taken_and_makes_room_for_another(sessions: ScriptedSessions) -> None:
    session = sessions.now = ScriptedSession(1)
    first = sink_of(CONFIG)
    assert sink_of(CONFIG) is first
    first.write(emission(1, 1))
    close_sinks()
    assert written(session) == [[1]]
    second = sink_of(CONFIG)
    assert second is not first
    other: ShardConfig = replace(CONFIG, commit_s=5.0)
    assert sink_of(other) is not second
    close_sinks()
