"""What a shard finds when it compares its last commit with the log, while it runs and when it starts."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from kafka import KafkaProducer, TopicPartition
from kafka.errors import KafkaTimeoutError
from markers import wait_for_markers
from shard_sessions import Open, named, record, visible, write_note

from infra.kafka import note, owner_check
from infra.kafka.aborted_outputs import OutputAborted, check_outputs, read_outcomes
from infra.kafka.admin import TopicSpec, admin_client, create_topics, delete_topics
from infra.kafka.log_gaps import LogTruncated
from infra.kafka.note import Note
from infra.kafka.open_transactions import open_transactions, write_marker
from infra.kafka.record_batches import Marker
from infra.kafka.session import Fenced, Outgoing, Session, SessionLost
from infra.kafka.session_config import Partition, SessionConfig


@pytest.fixture(autouse=True)
def _at_each_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the only broker answers: another one, which might know later ends, is not waited for."""
    monkeypatch.setattr("infra.kafka.commit_check.VERIFY_COMMITS", 1)
    monkeypatch.setattr("infra.kafka.present_leaders.LEADER_S", 0.0)


def test_verify_raises_when_commit_is_not_in_log(config: SessionConfig, opened: Open) -> None:
    session = opened(config)
    session.commit([record(config, b"A")], {}, {}, {})
    session.verify()
    wait_for_markers(config.client, config.restore.topic)  # without one the check is put off
    session.commits = session.noted = 3  # a commit that the log has not
    with pytest.raises(SessionLost, match=r"commit 2 is the last .* commit 3 was committed"):
        session.verify()


def lose_an_output(config: SessionConfig, session: Session) -> int:
    """As if another program had ended the session's transaction in the partition of an output alone: its offset."""
    with closing(KafkaProducer(**config.client.producer(transactional_id=f"{config.group}-other"))) as other:
        other.init_transactions()
        other.begin_transaction()
        aborted = other.send(config.ledger[0].topic, b"B", partition=0).get(10)
        other.abort_transaction()
    session._written[named(config.ledger[0])] = aborted.offset
    session.commit([], {}, {}, {})
    wait_for_markers(config.client, config.ledger[0].topic, config.restore.topic)
    return int(aborted.offset)


def test_verify_raises_when_an_output_was_aborted(config: SessionConfig, opened: Open) -> None:
    session = opened(config)
    session.commit([record(config, b"A")], {}, {}, {})
    session.verify()
    aborted = lose_an_output(config, session)
    with pytest.raises(OutputAborted, match=f"output at offset {aborted} of .*, partition 0, was aborted"):
        session.verify()


@pytest.mark.parametrize("is_ledger", [True, False])
def test_start_raises_when_an_output_was_aborted(config: SessionConfig, opened: Open, is_ledger: bool) -> None:
    """And so does the next one: nothing is committed before."""
    lose_an_output(config, opened(config))
    again = config if is_ledger else replace(config, ledger=())
    for _ in range(2):
        with pytest.raises(OutputAborted, match=r"output at offset 0 of .*, partition 0, was aborted"):
            opened(again)


def test_start_raises_when_an_output_is_gone(config: SessionConfig, opened: Open) -> None:
    """The topic is not its own, and no ledger."""
    config = replace(config, ledger=())
    session, topic = opened(config), f"{config.group}-out"
    session.commit([Outgoing(topic, 0, None, b"A", [])], {}, {}, {})
    session.close()
    wait_for_markers(config.client, topic, config.restore.topic)  # else they would be in the new topic
    with admin_client(config.client) as admin:
        delete_topics(admin, topic)
        create_topics(admin, [TopicSpec(topic, 1)])
    with pytest.raises(LogTruncated, match=f"{topic}:0 ends at 0, before its own output at 0"):
        opened(config)


def test_outputs_are_checked_without_what_follows_them(config: SessionConfig, opened: Open) -> None:
    """Else a start would take longer, the longer a run lasts: one request returns a part of so large a log alone."""
    session, place = opened(config), config.ledger[0]
    session.commit([record(config, b"A"), record(config, b"B")], {}, {}, {})
    with closing(KafkaProducer(**config.client.producer())) as other:
        for _ in range(4000):
            other.send(place.topic, b"x" * 1000)
    with session._observer() as observer:
        (end,) = observer.end_offsets([TopicPartition(*place)]).values()
        check_outputs(observer, config.group, {named(place): [1]})
        assert end > 4000
        assert observer.position(TopicPartition(*place)) < end / 2


def commit_but_abort(session: Session, place: Partition, outputs: list[Outgoing], note_due: bool = True) -> None:
    """Commit, while an administrator aborts the transaction in `place` alone: nobody notices."""
    producer, client = session._producer, session.config.client
    wait_for_markers(client, place.topic)
    commit = producer.commit_transaction

    def abort_before() -> None:
        with admin_client(client) as admin:
            (found,) = open_transactions(admin, [place.topic])
            write_marker(admin, found)
        commit()

    producer.commit_transaction = abort_before
    session.commit(outputs, {}, {}, {}, note_due=note_due)
    del producer.commit_transaction


@pytest.mark.parametrize("noted", [True, False])
def test_verify_finds_an_output_aborted_before_others(
    config: SessionConfig, opened: Open, monkeypatch: pytest.MonkeyPatch, noted: bool
) -> None:
    """With a note of its transaction, or without one; whatever was committed later."""
    monkeypatch.setattr("infra.kafka.commit_check.VERIFY_COMMITS", 5)
    session, place = opened(config), config.ledger[0]
    session.commit([record(config, b"A")], {}, {}, {})
    commit_but_abort(session, place, [record(config, b"B")], noted)
    assert session.noted == (3 if noted else 2)
    for value in (b"C", b"D"):
        session.verify()  # not due yet
        session.commit([record(config, value)], {}, {}, {})
    wait_for_markers(config.client, place.topic, config.restore.topic)
    assert visible(config, place.topic) == [b"A", b"C", b"D"]
    with pytest.raises(OutputAborted, match=f"output at offset 2 of {place.topic}, partition 0, was aborted"):
        session.verify()


def test_verify_finds_a_note_aborted_before_others(
    config: SessionConfig, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No output is lost, and the next session reads a later note."""
    session = opened(config)
    session.verify()
    monkeypatch.setattr("infra.kafka.commit_check.VERIFY_COMMITS", 2)
    commit_but_abort(session, config.restore, [record(config, b"A")])
    aborted = session._note_at
    session.commit([], {}, {}, {"later": 1})
    wait_for_markers(config.client, config.restore.topic)
    with pytest.raises(SessionLost, match=f"its note at offset {aborted} of .* was aborted, but later ones not"):
        session.verify()
    assert opened(config).note.state == {"later": 1}


def test_start_finds_an_output_aborted_before_others(
    config: SessionConfig, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session before it ended before its check was due."""
    monkeypatch.setattr("infra.kafka.commit_check.VERIFY_COMMITS", 1000)
    session, place = opened(config), config.ledger[0]
    commit_but_abort(session, place, [record(config, b"A")])
    for value in (b"B", b"C"):
        session.commit([record(config, value)], {}, {}, {})
    session.verify()
    session.close()
    for _ in range(2):
        with pytest.raises(OutputAborted, match=f"output at offset 0 of {place.topic}, partition 0, was aborted"):
            opened(config)


def test_outputs_without_an_end_are_undecided(config: SessionConfig, opened: Open) -> None:
    """A later check reads them again; one that the log has no more counts as committed."""
    session, place = opened(config), named(config.ledger[0])
    session.commit([record(config, b"A")], {}, {}, {})
    with closing(KafkaProducer(**config.client.producer(transactional_id=f"{config.group}-other"))) as other:
        other.init_transactions()
        other.begin_transaction()
        last = other.send(config.ledger[0].topic, b"B", partition=0).get(10).offset
        with session._observer() as observer:
            assert read_outcomes(observer, {place: [0, last - 1, last]}) == ([], {place: [last]})
        other.abort_transaction()
    wait_for_markers(config.client, config.ledger[0].topic)
    with session._observer() as observer:
        found = read_outcomes(observer, {place: [last]})
    assert found == ([(TopicPartition(*config.ledger[0]), last)], {place: []})


def test_far_outputs_are_read_without_those_between(
    config: SessionConfig, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, place = opened(config), config.ledger[0]
    monkeypatch.setattr("infra.kafka.aborted_outputs.FETCH_BYTES", 1000)
    session.commit([record(config, b"A")], {}, {}, {})
    with closing(KafkaProducer(**config.client.producer(batch_size=1000))) as other:
        for _ in range(1000):
            other.send(place.topic, b"x" * 1000)
    session.commit([record(config, b"B")], {}, {}, {})
    wait_for_markers(config.client, place.topic)
    read: list[int] = []
    with session._observer() as observer:
        poll = observer.poll
        observer.poll = lambda **given: read.append(len(found := poll(**given))) or found
        assert read_outcomes(observer, {named(place): [0, session._written[named(place)]]}).aborted == []
    assert sum(read) < 100


def test_verify_raises_when_the_note_is_overwritten(config: SessionConfig, opened: Open) -> None:
    session = opened(config)
    session.commit([], {}, {}, {})
    write_note(config, Note(session.start, commit=99).encode())
    with pytest.raises(SessionLost, match=r"commit 99 is the last .* commit 2 was committed"):
        session.verify()


def test_verify_raises_fenced_when_a_later_start_has_committed(config: SessionConfig, opened: Open) -> None:
    """And it stays so, whatever the other thread finds afterwards: the source must not fence the successor."""
    session = opened(config)
    session.commit([], {}, {}, {})
    write_note(config, Note(session.start + 1, commit=1).encode())
    with pytest.raises(Fenced, match="the note of start 2, commit 1 is the last"):
        session.verify()
    assert isinstance(session._give_up(KafkaTimeoutError()), Fenced)


def test_verify_waits_for_the_marker_of_the_note(
    config: SessionConfig, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka confirms a commit before it writes the markers; a note whose one never comes is an error."""
    session, read = opened(config), note.read_to_end
    session.commit([], {}, {}, {})
    with monkeypatch.context() as held_back:
        held_back.setattr(
            note, "read_to_end", lambda *place: (each for each in read(*place) if not isinstance(each, Marker))
        )
        session.verify()
        assert session.lost is None
        session.commit([], {}, {}, {})
        later = session._clients.monotonic() + config.transaction_timeout_s
        held_back.setattr(session._clients, "monotonic", lambda: later)
        session.verify()  # another note
        assert session.lost is None
        held_back.setattr(session._clients, "monotonic", lambda: later + config.transaction_timeout_s + 1)
        with pytest.raises(SessionLost, match="neither committed nor aborted"):
            session.verify()
    wait_for_markers(config.client, config.restore.topic)
    session.lost = None
    session.noted += 1  # as if the log did not have it: the check is still due
    with pytest.raises(SessionLost, match=r"commit 3 is the last .* commit 4 was committed"):
        session.verify()


def test_idle_session_learns_of_a_successor(
    config: SessionConfig, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(config)
    session.check_owner()
    write_note(config, Note(session.start + 1, commit=1).encode())
    session.check_owner()  # it has just committed
    monkeypatch.setattr(owner_check, "OWNER_S", 0.0)
    with pytest.raises(Fenced, match="start 2 owns it"):
        session.check_owner()


def test_idle_session_stays_while_kafka_does_not_answer(
    config: SessionConfig, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new session would fence a successor whose transaction is open."""

    def undecided(*arguments: object) -> None:
        raise KafkaTimeoutError("the last transaction is open")

    session = opened(config)
    monkeypatch.setattr(owner_check, "OWNER_S", 0.0)
    session.check_owner()
    monkeypatch.setattr(owner_check, "last_note", undecided)
    session.check_owner()
    assert session.lost is None


def test_verify_raises_when_there_is_no_note(
    config: SessionConfig, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the topic of notes had been deleted and created again."""
    session = opened(config)
    session.commit([], {}, {}, {})
    monkeypatch.setattr("infra.kafka.commit_check.last_note", lambda *arguments: None)
    with pytest.raises(SessionLost, match=r"no note is the last .* commit 2 was committed"):
        session.verify()


def test_verify_raises_when_an_output_is_gone(
    config: SessionConfig, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if its topic had been deleted and created again."""
    session, place = opened(config), f"{config.ledger[0].topic}:0"
    session.commit([record(config, b"A")], {}, {}, {})
    session.verify()
    monkeypatch.setitem(session._written, place, 100)
    session.commit([], {}, {}, {})
    wait_for_markers(config.client, config.restore.topic)
    with pytest.raises(LogTruncated, match=rf"{place} ends at \d+, before its own output at 100"):
        session.verify()
