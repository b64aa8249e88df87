"""ShardSink: it commits whole emissions of its start in order, and fails if they cannot be written."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import apache_beam as beam
import pytest
from scripted_sessions import CONFIG, INPUT, OUTPUT, ScriptedSession, ScriptedSessions, metric
from waiting import until

import operators.io.sink
from infra.kafka.aborted_outputs import OutputAborted
from infra.kafka.session import Note, SessionLost
from infra.kafka.sessions import Sessions
from operators.io.commits import ShardCommits
from operators.io.config import ShardConfig
from operators.io.elements import Checkpoint, Emission, Output, PartitionKey
from operators.io.sink import MAX_QUIET, ShardSink, SinkBroken, close_sinks, sink_of
from operators.io.write_transactionally import WriteTransactionally
from pipelines.roles import is_permanent
from schemas.codec import decode, encode
from schemas.records import DeadLetter
from schemas.topics import DEAD_LETTERS, METRICS


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


def test_sink_commits_outputs_offsets_ledger_and_state_together(sessions: ScriptedSessions, sink: ShardSink) -> None:
    session = sessions.current = ScriptedSession(1, note=Note(0, {OUTPUT: 3}))
    for one in (emission(1, 7, 8, low=2, ledger_from=0), emission(2, 9, low=4, ledger_from=1)):
        sink.write(one)
        sink.flush()
    sink.write(emission(3, low=4, ledger_from=2))
    sink.flush()
    assert written(session) == [[7, 8], [9], []]
    assert [low for _, low, *_ in session.committed] == [{INPUT: 2}, {INPUT: 4}, {INPUT: 4}]
    assert [ledger for _, _, ledger, _ in session.committed] == [{OUTPUT: 3}, {OUTPUT: 10}, {OUTPUT: 20}]
    assert {tuple(state) for *_, state in session.committed} == {("n",)}


def hold_in_commit(session: ScriptedSession, sink: ShardSink, first: Emission) -> threading.Event:
    """Write emission `first`, and return while it is being committed; commits end once the event is set."""
    under_way, release, commit = threading.Event(), threading.Event(), session.commit

    def slow(*arguments: object) -> dict[str, int]:
        under_way.set()
        release.wait(10)
        return commit(*arguments)  # type: ignore[arg-type]

    session.commit = slow  # type: ignore[method-assign]
    sink.write(first)
    assert under_way.wait(10)
    return release


def test_sink_commits_waiting_emissions_in_one_transaction(sessions: ScriptedSessions, sink: ShardSink) -> None:
    session = sessions.current = ScriptedSession(1)
    release = hold_in_commit(session, sink, emission(1, 1))
    for number in (2, 3, 4):
        sink.write(emission(number, number, low=number))
    assert sink.waiting == 3
    release.set()
    sink.flush()
    assert sink.waiting == 0
    assert written(session) == [[1], [2, 3, 4]]
    assert session.committed[-1][1] == {INPUT: 4}


def test_sink_leaves_out_notes_of_unnoted_topics_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    letter = DeadLetter("read metrics", "garbage", "a-topic", 0, 3, b"x", 1)
    now, session, sessions = 100.0, ScriptedSession(1), ScriptedSessions()
    sessions.current = session
    config = replace(CONFIG, commit_s=1.0, unnoted=(METRICS,))
    commits = ShardCommits(config, cast("Sessions", sessions), lambda: now)
    noted = []
    for number in range(1, 5):
        now += 0.4
        commits.commit([emission(number, number, low=number)])
        noted.append(session.noted == session.commits)
    assert noted == [True, False, False, True]
    commits.commit([replace(emission(5, 5), outputs=(Output(DEAD_LETTERS, "letter", letter),))])
    assert session.noted == session.commits, "another topic needs the note"
    commits.commit([emission(6, 6)])
    commits.commit([replace(emission(7, 7), last=True)])
    assert session.noted == session.commits, "the last transaction has a note"


def test_sink_splits_large_transactions_between_emissions(
    sessions: ScriptedSessions, sink: ShardSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = sessions.current = ScriptedSession(1)
    monkeypatch.setattr("operators.io.commits.MAX_TRANSACTION_BYTES", 3 * len(encode(metric(1))[0]))
    release = hold_in_commit(session, sink, emission(1, 1, 2, 3, 4))
    for number in range(2, 8):
        sink.write(emission(number, number, low=number))
    release.set()
    sink.flush()
    assert written(session) == [[1, 2, 3, 4], [2, 3, 4], [5, 6, 7]]
    assert [offsets[INPUT] for _, offsets, *_ in session.committed] == [0, 4, 7]


def test_sink_lets_the_session_verify_each_commit(sessions: ScriptedSessions, sink: ShardSink) -> None:
    session = sessions.current = ScriptedSession(1)
    for number in (1, 2):
        sink.write(emission(number, number))
        sink.flush()
    assert session.verified == [2, 3]


def test_sink_drops_emissions_of_another_start(sessions: ScriptedSessions, sink: ShardSink) -> None:
    session = sessions.current = ScriptedSession(2)
    for one in (emission(1, 1, start=1), emission(1, 2, start=2), emission(2, 3, start=3)):
        sink.write(one)
        sink.flush()
    assert written(session) == [[2]]


def test_sink_drops_repeated_emissions_and_fails_on_a_gap(sessions: ScriptedSessions, sink: ShardSink) -> None:
    session = sessions.current = ScriptedSession(1)
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


def test_sink_commits_bare_offsets_when_changed_and_due(sessions: ScriptedSessions) -> None:
    session = sessions.current = ScriptedSession(1)
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


def let_others_run() -> None:
    """Give threads that are ready a chance to run: more of them with each thread that is started and ends."""
    for _ in range(20):
        thread = threading.Thread(target=threading.get_ident)
        thread.start()
        thread.join()


def quiet_sink(monkeypatch: pytest.MonkeyPatch, quiet_s: float) -> tuple[ShardSink, list[list[int]]]:
    """A sink whose emissions without outputs wait `quiet_s` seconds; and the numbers of those it takes together."""
    taken: list[list[int]] = []
    commit = ShardCommits.commit

    def count(commits: ShardCommits, emissions: Sequence[Emission]) -> None:
        commit(commits, emissions)
        taken.append([each.number for each in emissions])

    monkeypatch.setattr(ShardCommits, "commit", count)
    monkeypatch.setattr(operators.io.sink, "QUIET_S", quiet_s)
    return ShardSink(CONFIG), taken


def test_emissions_without_outputs_wait_for_others(sessions: ScriptedSessions, monkeypatch: pytest.MonkeyPatch) -> None:
    session = sessions.current = ScriptedSession(1)
    sink, taken = quiet_sink(monkeypatch, quiet_s=1000.0)
    for one in (emission(1, low=1), emission(2, low=2), emission(3, 7, low=3)):
        let_others_run()
        sink.write(one)
    until(lambda: written(session) == [[7]])
    sink.write(emission(4, low=4))
    let_others_run()
    sink.write(replace(emission(5, low=5), last=True))
    until(lambda: len(taken) == 2)
    sink.write(emission(6, low=6))
    sink.flush()
    last = 6 + MAX_QUIET
    for number in range(7, last + 1):
        sink.write(emission(number, low=number))
    until(lambda: len(taken) == 4)
    sink.write(emission(last + 1, low=last + 1))
    sink.close()
    until(lambda: len(taken) == 5)
    assert taken == [[1, 2, 3], [4, 5], [6], [*range(7, last + 1)], [last + 1]]
    assert session.committed[-1][1] == {INPUT: last + 1}


def test_emission_without_outputs_waits_for_a_moment(
    sessions: ScriptedSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = sessions.current = ScriptedSession(1)
    sink, _ = quiet_sink(monkeypatch, quiet_s=0.01)
    sink.write(emission(1, low=1))
    until(lambda: session.committed)
    assert session.committed[0][1] == {INPUT: 1}
    sink.close()


def test_sink_never_resends_emissions_of_a_lost_session(sessions: ScriptedSessions, sink: ShardSink) -> None:
    lost = ScriptedSession(1, failure=SessionLost("unknown outcome"))
    sessions.current = lost
    sink.write(emission(1, 1))
    sink.flush()
    successor = sessions.current = ScriptedSession(2)
    sink.write(emission(2, 2))
    sink.write(emission(1, 3, start=2))
    sink.flush()
    assert (written(lost), written(successor)) == ([], [[3]])


def test_broken_sink_raises_and_ends_its_session(sessions: ScriptedSessions, sink: ShardSink) -> None:
    session = sessions.current = ScriptedSession(1, failure=ValueError("a record that does not fit"))
    sink.write(emission(1, 1))
    with pytest.raises(SinkBroken, match="does not fit"):
        sink.flush()
    with pytest.raises(SinkBroken):
        sink.write(emission(2, 2))
    assert isinstance(session.lost, SessionLost)


def test_role_ends_with_the_permanent_error_of_a_commit(
    sessions: ScriptedSessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be restarted, and go on without the lost output."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # Beam leaves folders
    session = sessions.current = ScriptedSession(1, failure=OutputAborted("the output is lost"))
    with pytest.raises(OutputAborted, match="the output is lost") as ended, beam.Pipeline("FnApiRunner") as pipeline:
        _ = pipeline | beam.Create([emission(1, 1)]) | WriteTransactionally(CONFIG)
    assert is_permanent(ended.value)
    assert isinstance(session.lost, SessionLost)


def test_close_sinks_passes_over_a_permanent_error(sessions: ScriptedSessions) -> None:
    sessions.current = ScriptedSession(1, failure=OutputAborted("the output is lost"))
    sink_of(CONFIG).write(emission(1, 1))
    close_sinks()
    assert sink_of(CONFIG).broken is None
    close_sinks()


def test_full_sink_blocks_the_step(
    sessions: ScriptedSessions, sink: ShardSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators.io.sink, "MAX_OUTPUTS", 4)
    session = sessions.current = ScriptedSession(1)
    release = hold_in_commit(session, sink, emission(1, 1))
    sink.write(emission(2, 2, 3, 4, 5))
    held = threading.Thread(target=sink.write, args=(emission(3, 6),))
    held.start()
    held.join(0.2)
    assert held.is_alive()
    release.set()
    held.join(10)
    sink.flush()
    assert written(session) == [[1], [2, 3, 4, 5], [6]]


def test_sink_flush_raises_if_a_transaction_does_not_end(sessions: ScriptedSessions, sink: ShardSink) -> None:
    session = sessions.current = ScriptedSession(1)
    release = threading.Event()
    session.commit = lambda *arguments: release.wait(10) and {}  # type: ignore[method-assign,return-value,assignment]
    sink.write(emission(1, 1))
    with pytest.raises(SinkBroken, match="has not ended"):
        sink.flush(0.05)
    release.set()


def test_close_sinks_commits_and_the_next_use_creates_a_sink(sessions: ScriptedSessions) -> None:
    session = sessions.current = ScriptedSession(1)
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
