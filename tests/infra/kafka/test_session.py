"""The restart protocol on a real broker: who may commit, what a start finds, and what nobody ever sees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from kafka import KafkaProducer, TopicPartition
from kafka.errors import KafkaError, KafkaTimeoutError
from markers import wait_for_markers
from shard_sessions import Open, feed, named, polled, record, source, visible, write_note
from waiting import until

from infra.kafka.admin import admin_client, committed_offsets
from infra.kafka.group_progress import GROUP_OFFSETS_S
from infra.kafka.note import MAX_NOTE_BYTES, Note, last_note
from infra.kafka.properties import ClientProperties
from infra.kafka.session import Fenced, Partition, Session, SessionLost
from infra.kafka.session_config import Input, SessionConfig
from infra.kafka.sessions import SESSIONS
from infra.kafka.transactions import TransactionTooSlow
from schemas.codec import encode
from schemas.records import CommitNote

REPOSITORY = Path(__file__).parents[3]


def test_session_restores_offsets_and_note(config: SessionConfig, opened: Open) -> None:
    feed(config, b"a", b"b", b"c")
    first = opened(config)
    assert (first.start, first.note, first.ledger) == (1, Note(), [])
    assert polled(first, 3) == [b"a", b"b", b"c"]
    place = f"{config.ledger[0].topic}:0"
    assert first.commit([record(config, b"A")], {source(config): 1}, {place: 0}, {"mark": 7}) == {place: 0}
    second = opened(config)
    assert second.start == 2
    assert second.note == Note(1, {place: 0}, {"mark": 7}, {named(source(config)): 1}, commit=2, written={place: 0})
    assert [r.value for r in second.ledger] == [b"A"]
    assert polled(second, 2) == [b"b", b"c"]
    third = opened(config)
    assert (third.start, third.note.start, third.note.ledger, third.note.state) == (3, 2, {place: 0}, {"mark": 7})
    assert third.positions() == {source(config): 1}


def test_session_reads_ledger_from_noted_offsets(config: SessionConfig, opened: Open) -> None:
    session = opened(config)
    place = f"{config.ledger[0].topic}:0"
    session.commit([record(config, b"A")], {}, {}, {})
    first = session.commit([record(config, b"B"), record(config, b"C")], {}, {}, {})
    session.commit([], {}, first, {})
    assert first == {place: 2}  # after A and its commit marker
    assert [r.value for r in opened(config).ledger] == [b"B", b"C"]


def test_session_ignores_the_note_of_an_aborted_transaction(config: SessionConfig, opened: Open) -> None:
    feed(config, b"a", b"b")
    first = opened(config)
    first.commit([record(config, b"A")], {source(config): 1}, {}, {"mark": "x" * 3000})
    producer = first._producer
    producer.begin([])
    value, headers = encode(CommitNote(config.group, Note(1, {}, {"never": 0}).encode(), 0))
    producer.send(config.restore.topic, value, config.group.encode(), list(headers), 0)
    producer.flush()
    second = opened(config)
    assert second.note.state == {"mark": "x" * 3000}
    assert second.positions() == {source(config): 1}


def test_start_needs_no_end_of_its_own_aborted_record(config: SessionConfig, opened: Open) -> None:
    first = opened(config)
    first.commit([], {source(config): 0}, {}, {"mark": 1})
    for value, decided in ((b"", True), (b"a note", False)):
        first._producer.begin([TopicPartition(*config.restore)])
        first._producer.send(config.restore.topic, value, config.group.encode(), [], 0)
        first._producer.flush()
        with nullcontext() if decided else pytest.raises(SessionLost, match="neither committed nor aborted"):
            note = first._last_note()
            assert note is not None
            assert note.state == {"mark": 1}
        first._producer.abort_transaction()


def test_session_ignores_notes_written_without_a_transaction(config: SessionConfig, opened: Open) -> None:
    first = opened(config)
    first.commit([], {source(config): 0}, {}, {"mark": 1})
    foreign = KafkaProducer(**config.client.producer())
    valid, headers = encode(CommitNote(config.group, Note(1, {}, {"never": 0}, commit=9).encode(), 0))
    old = [("laminar-schema", b"CommitNote/1")]
    for value, of in ((valid, list(headers)), (b"garbage", list(headers)), (b"garbage", []), (b"old", old)):
        foreign.send(config.restore.topic, value, config.group.encode(), of, 0)
    foreign.close()
    first.commit([], {source(config): 0}, {}, {"mark": 2})
    wait_for_markers(config.client, config.restore.topic)
    with first._observer() as observer:
        assert last_note(observer, TopicPartition(*config.restore), config.group) is not None
    assert opened(config).note.state == {"mark": 2}


def test_session_ignores_notes_that_do_not_follow(config: SessionConfig, opened: Open) -> None:
    opened(config).commit([], {source(config): 0}, {}, {"mark": 1})
    session = opened(config)
    session.commit([], {source(config): 0}, {}, {"mark": 2})
    for foreign in (Note(1, {}, {"never": 0}, commit=9), Note(2, {}, {"never": 0}, commit=1), Note(10**9, commit=1)):
        write_note(config, foreign.encode())
    assert opened(config).note.state == {"mark": 2}


def test_session_makes_no_progress_by_smaller_commits(config: SessionConfig, opened: Open) -> None:
    """A transaction that is too slow would else repeat for ever, after the small ones before it."""
    session = opened(config)
    assert not session.progress.made
    session.commit([record(config, b"small")], {}, {}, {})
    assert session.progress.made
    session._producer._bound_s = 0
    with pytest.raises(SessionLost) as lost:
        session.commit([record(config, b"x" * 100)], {}, {}, {})
    assert isinstance(lost.value.__cause__, TransactionTooSlow)
    assert (session.progress.made, session.progress.failed_bytes) == (False, 100)


@pytest.mark.parametrize("text", [b"garbage", "{", '["x"]', "[1, [2]]", "[1, {}, {}, {}, -1]"])
def test_unreadable_note_is_named_with_its_offset(config: SessionConfig, opened: Open, text: str | bytes) -> None:
    write_note(config, text)
    with pytest.raises(ValueError, match=f"offset 0 of partition 0 of {config.restore.topic}"):
        opened(config)


def test_session_starts_with_open_transaction_of_another_shard(config: SessionConfig, opened: Open) -> None:
    first = opened(config)
    first.commit([], {source(config): 0}, {}, {"mark": 1})
    other = KafkaProducer(**config.client.producer(transactional_id=f"{config.group}-other"))
    other.init_transactions()
    other.begin_transaction()
    other.send(config.restore.topic, b"undecided", b"other")
    other.flush()
    first.commit([], {source(config): 0}, {}, {"mark": 2})
    assert opened(config).note.state == {"mark": 2}
    other.close()


def test_session_resumes_without_group_offsets(config: SessionConfig, opened: Open) -> None:
    feed(config, b"a", b"b")
    opened(config).commit([record(config, b"A")], {source(config): 1}, {}, {"mark": 1})
    with admin_client(config.client) as admin:
        admin.delete_groups([config.group])
    successor = opened(config)
    assert (successor.start, successor.positions(), successor.note.state) == (2, {source(config): 1}, {"mark": 1})


def test_group_offsets_follow_the_note(config: SessionConfig, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    feed(config, b"a", b"b", b"c")
    session, now = opened(config), time.monotonic() + GROUP_OFFSETS_S
    place = TopicPartition(*source(config))
    monkeypatch.setattr(session._clients, "monotonic", lambda: now)

    def until_group_is_at(offset: int) -> None:
        """Kafka shows it once the marker of the transaction is written."""
        with admin_client(config.client) as admin:
            until(lambda: (found := committed_offsets(admin, config.group).get(place)) and found.offset == offset)

    session.commit([record(config, b"A")], {source(config): 1}, {}, {})
    session.commit([record(config, b"B")], {source(config): 2}, {}, {})
    assert not session.group_offsets_due(), "written less than a second ago"
    until_group_is_at(1)
    now += GROUP_OFFSETS_S
    assert session.group_offsets_due()
    session.commit([], {}, {}, {})
    assert not session.group_offsets_due()
    until_group_is_at(2)  # offsets of an earlier commit are not forgotten
    session.commit([], {source(config): 3}, {}, {}, True)
    assert not session.group_offsets_due(last=True)
    until_group_is_at(3)  # the last commit does not wait
    assert opened(config).note.offsets == {named(source(config)): 3}


def test_note_is_left_out_if_the_last_one_names_the_partitions(config: SessionConfig, opened: Open) -> None:
    """A start must find a transaction that hangs in a partition, and that partition is known from the note alone."""
    session, place = opened(config), f"{config.ledger[0].topic}:0"
    written = [
        session.commit([record(config, each)], {}, {}, {"mark": each.decode()}, False, False) for each in (b"A", b"B")
    ]
    assert (written, session.commits, session.noted) == ([{place: 0}, {place: 2}], 3, 2)
    session.verify()
    successor = opened(config)
    assert (successor.note.state, successor.note.written) == ({"mark": "A"}, {place: 0})
    assert [each.value for each in successor.ledger] == [b"A", b"B"], "the transaction without a note counts"


def test_commit_rejects_note_over_limit_before_writing(config: SessionConfig, opened: Open) -> None:
    session = opened(config)
    with pytest.raises(ValueError, match="give the role more shards"):
        session.commit([record(config, b"A")], {}, {}, {"mark": "x" * MAX_NOTE_BYTES})
    session.commit([record(config, b"B")], {}, {}, {})
    assert visible(config, config.ledger[0].topic) == [b"B"]


@pytest.mark.parametrize("before", ["begin", "send", "send_offsets_to_transaction", "commit_transaction"])
def test_successor_fences_predecessor_at_every_step(config: SessionConfig, opened: Open, before: str) -> None:
    predecessor, successors = opened(config), []
    call = getattr(predecessor._producer, before)

    def open_successor_then_call(*arguments: object) -> object:
        if not successors:
            predecessor._producer.flush()
            successors.append(opened(config))
        return call(*arguments)

    setattr(predecessor._producer, before, open_successor_then_call)
    with pytest.raises(Fenced, match="superseded by a newer process of this shard"):
        predecessor.commit([record(config, b"late")] * 2, {source(config): 9}, {}, {}, last=True)
    (successor,) = successors
    assert isinstance(predecessor.lost, Fenced)
    with pytest.raises(Fenced):  # and again, without asking Kafka
        predecessor.commit([], {}, {}, {})
    successor.commit([record(config, b"mine")], {}, {}, {})
    assert visible(config, config.ledger[0].topic) == [b"mine"]


def test_commit_detects_fencing_by_rejected_record(config: SessionConfig, opened: Open) -> None:
    predecessor = opened(config)
    producer, send, calls = predecessor._producer, predecessor._producer.send, 0

    def send_as_a_successor_opens(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KafkaError("cannot send, for some reason")
        future = send(*arguments)
        producer.flush()
        if calls == 1:
            opened(config)
        return future

    producer.send = send_as_a_successor_opens
    with pytest.raises(Fenced, match="for some reason"):
        predecessor.commit([record(config, b"late")] * 3, {}, {}, {})


STOPS_BEFORE_ITS_COMMIT = """
import json, os, signal, sys
from infra.kafka.properties import ClientProperties
from infra.kafka.session import *
from infra.kafka.session_config import *
address, group, source, output = sys.argv[1:]
inputs, restore = (Input(source, (0,)),), Partition(f"{group}-restore", 0)
config = SessionConfig(ClientProperties.at(address), group, inputs, restore, (Partition(output, 0),))
session = Session(config)
commit = session._producer.commit_transaction
def stop_then_commit():
    session._producer.flush()
    os.kill(os.getpid(), signal.SIGSTOP)
    commit()
session._producer.commit_transaction = stop_then_commit
try:
    session.commit([Outgoing(output, 0, None, b"zombie", [])], {Partition(source, 0): 1}, {}, {})
except Fenced:
    os._exit(33)
"""


def test_paused_predecessor_cannot_commit(config: SessionConfig, opened: Open) -> None:
    feed(config, b"a", b"b")
    arguments = [config.client.bootstrap_servers, config.group, source(config).topic, config.ledger[0].topic]
    command = [sys.executable, "-c", STOPS_BEFORE_ITS_COMMIT, *arguments]
    with subprocess.Popen(command, cwd=REPOSITORY) as predecessor:
        try:
            process = psutil.Process(predecessor.pid)
            until(lambda: process.status() == psutil.STATUS_STOPPED)
            successor = opened(config)
            assert (successor.start, successor.ledger) == (2, [])
            assert polled(successor, 2) == [b"a", b"b"]
            successor.commit([record(config, b"mine")], {source(config): 2}, {}, {})
            os.kill(predecessor.pid, signal.SIGCONT)
            assert predecessor.wait(timeout=30) == 33
        finally:
            predecessor.kill()
    assert visible(config, config.ledger[0].topic) == [b"mine"]
    assert opened(config).positions() == {source(config): 2}


def test_session_hides_aborted_records(config: SessionConfig, opened: Open) -> None:
    session = opened(config)
    session._producer.begin_transaction()
    session._producer.send(config.ledger[0].topic, b"never")
    session._producer.flush()
    session.close()
    successor = opened(config)  # its fence ends the transaction
    assert successor.ledger == []
    assert visible(config, config.ledger[0].topic) == []


def test_ledger_is_complete_with_open_transaction_of_another(config: SessionConfig, opened: Open) -> None:
    """Read_committed ends stop before anybody's open transaction; the shard's own records may lie behind it."""
    session = opened(config)
    other = KafkaProducer(**config.client.producer(transactional_id=f"{config.group}-other"))
    other.init_transactions()
    other.begin_transaction()
    other.send(config.ledger[0].topic, b"other")
    other.flush()
    session.commit([record(config, b"mine")], {}, {}, {})
    with ThreadPoolExecutor(1) as executor:
        successor = executor.submit(opened, config)
        time.sleep(1.0)
        waits = not successor.done()
        other.commit_transaction()
        other.close()
        assert [r.value for r in successor.result(timeout=60).ledger] == [b"other", b"mine"]
    assert waits


def test_commit_without_offsets_keeps_them(config: SessionConfig, opened: Open) -> None:
    feed(config, b"a", b"b")
    session = opened(config)
    session.commit([], {source(config): 2}, {}, {})
    session.commit([record(config, b"A")], {}, {}, {"mark": 1})
    successor = opened(config)
    assert (successor.positions(), successor.note.state) == ({source(config): 2}, {"mark": 1})


def test_inputs_begin_at_configured_start(config: SessionConfig, opened: Open) -> None:
    feed(config, b"a", b"b")
    opened(config).commit([], {source(config): 1}, {}, {})
    for start, offset in (("committed", 1), ("earliest", 0), ("latest", 2)):
        told = replace(config, inputs=(Input(source(config).topic, (0,), start),), ledger=())  # type: ignore[arg-type]
        session = opened(told)
        assert (start, session.positions()) == (start, {source(config): offset})
        assert session.ends == {source(config): 2}
    session.seek({source(config): 1})
    assert polled(session, 1) == [b"b"]


def test_session_without_commit_reads_newest_records(config: SessionConfig, opened: Open) -> None:
    feed(config, b"a", b"b", b"c")
    newest = replace(config, inputs=(Input(source(config).topic, (0,), newest=2),))
    session = opened(newest)
    assert session.positions() == {source(config): 1}
    session.commit([], {source(config): 0}, {}, {})
    assert opened(newest).positions() == {source(config): 0}  # what is committed counts, however far back
    all_of_it = replace(newest, group=f"{config.group}-2", inputs=(Input(source(config).topic, (0,), newest=9),))
    assert opened(all_of_it).positions() == {source(config): 0}


def test_session_without_inputs_has_a_note(config: SessionConfig, opened: Open) -> None:
    alone = replace(config, inputs=())
    session = opened(alone)
    began = time.monotonic()
    assert (session.poll(0.1), session.positions()) == ([], {})
    assert time.monotonic() - began >= 0.1
    session.commit([record(config, b"A")], {}, {}, {"next": 5})
    successor = opened(alone)
    assert (successor.start, successor.note.state, len(successor.ledger)) == (2, {"next": 5}, 1)


def test_next_start_finds_commit_with_lost_response(config: SessionConfig, opened: Open) -> None:
    session = opened(config)
    commit = session._producer.commit_transaction

    def commit_then_lose_the_answer() -> None:
        commit()
        raise KafkaTimeoutError("no answer")

    session._producer.commit_transaction = commit_then_lose_the_answer
    with pytest.raises(SessionLost, match="no answer"):
        session.commit([record(config, b"A")], {source(config): 0}, {}, {"mark": 1})
    assert not isinstance(session.lost, Fenced)
    with pytest.raises(SessionLost):  # never again in this session
        session.commit([record(config, b"A")], {}, {}, {})
    successor = opened(config)
    assert ([r.value for r in successor.ledger], successor.note.state) == ([b"A"], {"mark": 1})


def test_process_has_one_session_per_group(config: SessionConfig) -> None:
    try:
        first = SESSIONS.open(config)
        second = SESSIONS.open(config)
        assert SESSIONS.get(config.group) is second
        assert (first.lost is not None, second.lost) == (True, None)
        with pytest.raises(SessionLost, match="closed"):
            first.commit([], {}, {}, {})
    finally:
        SESSIONS.close(config.group)
    assert SESSIONS.get(config.group) is None


def test_session_fails_without_broker() -> None:
    nowhere = ClientProperties.at("127.0.0.1:9")
    with pytest.raises(SessionLost, match=r"nobody: 127\.0\.0\.1:9: Connection refused"):
        Session(SessionConfig(nowhere, "nobody", (Input("in", (0,)),), Partition("restore", 0)))
