"""ShardSource: decoding of Kafka records, and when a new start begins."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from kafka import KafkaProducer
from record_factories import status
from scripted_sessions import CONFIG, INPUT, ScriptedSession, ScriptedSessions, metric, raw

import operators.io.source
from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.open_transactions import STALLED_POLLS, STALLED_S
from infra.kafka.properties import ClientProperties
from infra.kafka.session import Fenced, Note, SessionLost
from infra.kafka.transactions import TransactionTooSlow
from operators.io.config import ShardConfig, TopicInput
from operators.io.elements import PartitionKey, Polled, ReceivedRecord, Restored
from operators.io.source import (
    MAX_PAYLOAD_BYTES,
    MAX_SESSIONS_WITHOUT_COMMIT,
    MAX_SLOW_SESSIONS,
    AlwaysTooSlow,
    ShardSource,
)
from schemas.codec import MAX_VALUE_BYTES, encode
from schemas.records import DeadLetter
from schemas.topics import METRICS, REPLICAS, RESTORE

HERE = PartitionKey("metrics", 0)


class Clock:
    """A clock that advances by `step` seconds per read."""

    now, step = 0.0, 1.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def source_with(monkeypatch: pytest.MonkeyPatch, *script: ScriptedSession | SessionLost) -> ShardSource:
    monkeypatch.setattr(operators.io.source, "SESSIONS", ScriptedSessions(*script))
    return ShardSource(CONFIG, wall_ms=lambda: 1234, clock=Clock(), wait=lambda pause: False)


def test_source_decodes_records_in_order_row_by_row() -> None:
    received, rejected = ShardSource(CONFIG).decode([raw(4), raw(5)])
    assert (received, rejected) == (
        (ReceivedRecord("metrics", 0, 4, metric(4)), ReceivedRecord("metrics", 0, 5, metric(5))),
        (),
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"value": b"\x00garbage"}, ""),
        ({"value": None}, "tombstone"),
        ({"headers": []}, "no laminar-schema header"),
        ({"headers": [("laminar-schema", b"Metric/99")]}, "unknown schema"),
        (
            dict(zip(("value", "headers"), encode(status(0, None)), strict=True)),
            "a ReplicaStatus does not belong on metrics",
        ),
    ],
)
def test_source_makes_a_dead_letter_of_an_undecodable_record(changes: dict, reason: str) -> None:
    received, (letter,) = ShardSource(CONFIG, wall_ms=lambda: 99).decode([raw(1), raw(2, **changes), raw(3)])
    assert [r.offset for r in received] == [1, 3]
    payload = changes.get("value", raw(2).value) or b""
    assert letter == DeadLetter("read metrics", letter.reason, "metrics", 0, 2, payload, 99)
    assert reason in letter.reason


def test_source_makes_a_dead_letter_of_an_old_release_record(monkeypatch: pytest.MonkeyPatch) -> None:
    old = raw(2, headers=[("laminar-schema", b"Metric/1")])
    received, (letter,) = source_with(monkeypatch).decode([raw(1), old, raw(3)])
    assert [r.offset for r in received] == [1, 3]
    assert letter.reason == "unknown schema b'Metric/1', of release 0.1.0"
    assert isinstance(source_with(monkeypatch, ScriptedSession(1, ledger=[old])).next(wait=False), Restored)


def test_source_truncates_payloads_of_dead_letters() -> None:
    _, (letter,) = ShardSource(CONFIG).decode([raw(1, value=b"x" * (MAX_VALUE_BYTES + 1))])
    assert len(letter.payload) == MAX_PAYLOAD_BYTES
    assert "payload truncated from" in letter.reason
    encode(letter)


def test_source_skips_records_with_other_keys() -> None:
    source = ShardSource(replace(CONFIG, inputs=(TopicInput(METRICS, keys=("e",)),)))
    received, rejected = source.decode([raw(1, key=b"e4"), raw(2, key=b"p4", value=b"junk"), raw(3, key=None)])
    assert ([r.offset for r in received], rejected) == ([1], ())


def test_final_poll_belongs_to_the_open_session(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ScriptedSession(3, [[raw(0)]])
    source = source_with(monkeypatch, session)
    assert source.final_poll() is None
    source.next(wait=False)
    source.next(wait=False)
    assert source.final_poll() == Polled(CONFIG.group, 3, (), (), {HERE: 1}, True, last=True)
    session.lost = SessionLost("gone")
    assert source.final_poll() is None


def test_source_begins_a_start_with_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    beat = status(0, None)
    own = raw(8, beat, topic=REPLICAS.name("run"))
    session = ScriptedSession(3, [[raw(0)], [], [raw(1)]], Note(2, {}, {"mark": 1}), [own], end=2)
    source = source_with(monkeypatch, session)
    elements = [source.next(wait=False) for _ in range(4)]
    ledger = (ReceivedRecord("replicas", 0, 8, beat),)
    assert elements[0] == Restored(CONFIG.group, 3, ledger, {"mark": 1}, {HERE: 0}, first_start=3)
    assert [(len(e.records), e.positions, e.caught_up) for e in elements[1:] if isinstance(e, Polled)] == [
        (1, {HERE: 1}, False),
        (0, {HERE: 1}, False),
        (1, {HERE: 2}, True),
    ]


def test_source_pauses_polls_of_a_busy_step_after_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ScriptedSession(1, [[raw(0)], [], [raw(1)], [raw(2)]], end=1)
    monkeypatch.setattr(operators.io.source, "SESSIONS", ScriptedSessions(session))
    now = 100.0
    source = ShardSource(CONFIG, clock=lambda: now)
    source.next(wait=False)

    def next_poll(wait: bool) -> tuple[int, int, bool]:
        polled = source.next(wait)
        assert isinstance(polled, Polled)
        return len(polled.records), polled.positions[HERE], polled.caught_up

    assert [next_poll(False) for _ in range(4)] == [(1, 1, True), (0, 1, True), (0, 1, True), (0, 1, True)]
    assert len(session.polls) == 2
    now += 0.021
    assert next_poll(False) == (1, 2, True)
    assert next_poll(False) == (1, 3, True)  # at once, since there may be more
    assert next_poll(False) == (0, 3, True)
    session.polls = [[raw(3)]]
    assert next_poll(False) == (0, 3, True)
    assert next_poll(True) == (1, 4, True)  # a waiting poll is never skipped


def test_source_drops_records_of_others_from_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = REPLICAS.name("run")
    read_back = [raw(0, status(0, None), topic=topic), raw(1, metric(1), topic=topic), raw(2, topic=topic, value=b"?")]
    restored = source_with(monkeypatch, ScriptedSession(1, ledger=read_back)).next(wait=False)
    assert isinstance(restored, Restored)
    assert restored.ledger == (ReceivedRecord("replicas", 0, 0, status(0, None)),)


def test_source_resumes_at_start_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators.io.source, "SESSIONS", ScriptedSessions(ScriptedSession(1)))
    restored = ShardSource(replace(CONFIG, start_positions=lambda: {HERE: 42})).next(wait=False)
    assert isinstance(restored, Restored)
    assert restored.offsets == {HERE: 42}


def test_source_begins_a_new_start_after_a_lost_session(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ScriptedSession(1, [[raw(0)]], end=1)
    second = ScriptedSession(2, [SessionLost("poll")])
    source = source_with(monkeypatch, first, second, ScriptedSession(3, end=1))
    restored, polled = (source.next(wait=False) for _ in range(2))
    assert isinstance(restored, Restored)
    assert isinstance(polled, Polled)
    assert polled.caught_up
    first.lost = SessionLost("unknown outcome")
    *_, last = elements = [source.next(wait=False) for _ in range(3)]
    assert [element.start for element in elements] == [2, 3, 3]
    assert isinstance(last, Polled)
    assert not last.caught_up  # each start has to catch up again


def test_fenced_source_never_opens_another_session(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ScriptedSession(1)
    source = source_with(monkeypatch, first, ScriptedSession(2))
    source.next(wait=False)
    first.lost = Fenced("a successor")
    for poll in (1, 0):  # a retry by the runner does not help
        source.resume_at(poll)
        with pytest.raises(Fenced):
            source.next(wait=False)


def test_source_retries_while_the_broker_is_down_until_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    away = SessionLost("connection refused")
    first = ScriptedSession(1, [away])
    source = source_with(monkeypatch, first, away, away, ScriptedSession(2, [away]), away)
    assert [source.next(wait=False).start for _ in range(2)] == [1, 2]
    monkeypatch.setattr(operators.io.source, "SESSION_TIMEOUT_S", -1.0)
    with pytest.raises(SessionLost, match="refused"):
        source.next(wait=False)


def test_source_names_the_transaction_that_blocks_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(operators.io.source, "describe_blocking_transactions", lambda client, places: [f"{places}"])
    source = source_with(monkeypatch, ScriptedSession(1, end=5))
    for _ in range(int(STALLED_S)):
        source.next(wait=False)
    (line,) = (record.message for record in caplog.records if "waits" in record.message)
    assert f"{CONFIG.group} waits: [{INPUT}]" in line


def test_busy_source_names_the_transaction_that_blocks_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(operators.io.source, "describe_blocking_transactions", lambda client, places: ["blocked"])
    source = source_with(monkeypatch, ScriptedSession(1, [[raw(0)] for _ in range(int(STALLED_S))], end=5))
    for _ in range(int(STALLED_S)):
        polled = source.next(wait=False)
        assert isinstance(polled, Restored) or polled.records
    assert [each.message for each in caplog.records if "waits" in each.message] == [f"{CONFIG.group} waits: blocked"]


def test_slow_step_names_what_blocks_it_after_some_polls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However long its folds take: one poll alone shows nothing, since it has the records of some partitions only."""
    monkeypatch.setattr(operators.io.source, "describe_blocking_transactions", lambda client, places: ["blocked"])
    source = source_with(monkeypatch, ScriptedSession(1, [[raw(0)]] * (STALLED_POLLS + 1), end=5))
    source._clock.step = STALLED_S  # type: ignore[attr-defined]
    for _ in range(STALLED_POLLS + 1):  # the first opens the session
        source.next(wait=False)
    assert not any("waits" in each.message for each in caplog.records)
    source.next(wait=False)
    assert [each.message for each in caplog.records if "waits" in each.message] == [f"{CONFIG.group} waits: blocked"]


def test_source_opens_a_new_session_if_an_input_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    deleted = SessionLost("there is no topic laminar.run.metrics")
    first = ScriptedSession(1)
    source = source_with(monkeypatch, first, deleted, ScriptedSession(2), deleted)
    assert isinstance(source.next(wait=False), Restored)
    assert isinstance(source.next(wait=False), Polled)
    first.deleted = deleted
    assert source.next(wait=False).start == 2  # the topic was missing only for a moment
    monkeypatch.setattr(operators.io.source, "SESSION_TIMEOUT_S", -1.0)
    source._session.deleted = deleted
    with pytest.raises(SessionLost, match=r"no topic laminar\.run\.metrics"):
        source.next(wait=False)


def test_source_retries_the_first_session_until_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_with(monkeypatch, SessionLost("reset by peer"), ScriptedSession(1))
    assert source.next(wait=False).start == 1
    monkeypatch.setattr(operators.io.source, "FIRST_SESSION_TIMEOUT_S", -1.0)
    source = source_with(monkeypatch, SessionLost("connection refused"), ScriptedSession(1))
    with pytest.raises(SessionLost, match="refused"):
        source.next(wait=False)


def test_source_does_not_retry_a_fenced_first_session(monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_with(monkeypatch, Fenced("a successor"), ScriptedSession(1))
    with pytest.raises(Fenced):
        source.next(wait=False)


def test_source_fails_after_many_sessions_without_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = [ScriptedSession(n, [SessionLost("not allowed")]) for n in range(1, 2 * MAX_SESSIONS_WITHOUT_COMMIT)]
    source = source_with(monkeypatch, *sessions)
    for _ in range(MAX_SESSIONS_WITHOUT_COMMIT + 1):
        assert isinstance(source.next(wait=False), Restored)
    with pytest.raises(SessionLost, match="not allowed"):
        source.next(wait=False)
    assert source._session is sessions[MAX_SESSIONS_WITHOUT_COMMIT]
    sessions[MAX_SESSIONS_WITHOUT_COMMIT].commits = 2  # a commit of its own
    assert isinstance(source.next(wait=False), Restored)


def test_source_ends_if_transactions_are_always_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [SessionLost("raise kafka.transaction_timeout_s") for _ in range(MAX_SLOW_SESSIONS + 2)]
    for each in slow:
        each.__cause__ = TransactionTooSlow("95 s")
    sessions = [ScriptedSession(n, [lost]) for n, lost in enumerate(slow, 1)]
    sessions[1].commits = 2  # one of its own: the link is only slow at times
    source = source_with(monkeypatch, *sessions)
    for _ in range(MAX_SLOW_SESSIONS + 2):
        assert isinstance(source.next(wait=False), Restored)
    with pytest.raises(AlwaysTooSlow, match=r"4 sessions in a row .* raise kafka.transaction_timeout_s .* resume"):
        source.next(wait=False)


@pytest.mark.parametrize(("resumed_at", "kind"), [(3, Polled), (0, Restored), (2, Restored), (9, Restored)])
def test_source_begins_a_new_start_if_the_runner_goes_back(
    monkeypatch: pytest.MonkeyPatch, resumed_at: int, kind: type
) -> None:
    source = source_with(monkeypatch, ScriptedSession(1, [[raw(0)], [raw(1)]]), ScriptedSession(2))
    source.resume_at(0)
    for _ in range(3):
        source.next(wait=False)
    source.resume_at(resumed_at)
    assert isinstance(source.next(wait=False), kind)


def test_source_names_topics_behind_an_open_transaction(broker: Broker, run_id: str) -> None:
    """Until the transaction ends, a reader cannot tell silence from what it hides."""
    client = ClientProperties.at(broker.bootstrap_servers)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(topic.name(run_id), 1) for topic in (METRICS, RESTORE)])
    source = ShardSource(ShardConfig(client, run_id, "autoscaler", inputs=(TopicInput(METRICS, start="latest"),)))

    def until(unread: set[str]) -> Polled:
        for _ in range(300):
            polled = source.next(wait=True)
            if isinstance(polled, Polled) and polled.unread == unread:
                return polled
        raise AssertionError(f"{polled} instead of unread {unread}")

    with closing(source), closing(KafkaProducer(**client.producer(transactional_id=f"{run_id}-dead"))) as writer:
        until(set())
        writer.init_transactions()
        writer.begin_transaction()
        writer.send(METRICS.name(run_id), b"undecided").get(10)
        assert until({"metrics"}).records == ()
        writer.abort_transaction()
        until(set())
