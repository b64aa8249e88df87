"""A new number of shards on a real broker: every partition continues where the shard that had it stopped."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from kafka import KafkaProducer, TopicPartition
from markers import wait_for_markers
from shard_sessions import Open

import infra.kafka.resharding
import infra.kafka.session
from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.clients import KafkaClients
from infra.kafka.note import Note, last_notes, read_to_end, uncommitted_consumer
from infra.kafka.properties import ClientProperties
from infra.kafka.record_batches import RecordBatch
from infra.kafka.resharding import reshard
from infra.kafka.run_release import NOTE_HEADER
from infra.kafka.session import Outgoing, Partition, Session, SessionLost
from infra.kafka.session_config import Input, SessionConfig
from infra.kafka.shard_layout import OtherLayout
from schemas.codec import encode
from schemas.records import CommitNote

PARTITIONS = 4


class Role:
    """Copies its input partitions to the same ones of its output; its state is the counts by partition."""

    def __init__(self, broker: Broker, run: str, opened: Open) -> None:
        self.client = ClientProperties.at(broker.bootstrap_servers)
        self._run, self._opened = run, opened
        topics = [TopicSpec(f"{run}-{name}", PARTITIONS) for name in ("in", "out")]
        with admin_client(self.client) as admin:
            create_topics(admin, [*topics, TopicSpec(f"{run}-restore", 1)])

    def config(self, shard: int, shards: int) -> SessionConfig:
        own = tuple(range(PARTITIONS))[shard::shards]
        return SessionConfig(
            self.client,
            f"{self._run}.copy.{shard}",
            (Input(f"{self._run}-in", own),),
            Partition(f"{self._run}-restore", 0),
            ledger=tuple(Partition(f"{self._run}-out", each) for each in own),
            shards=shards,
        )

    def feed(self, *values: str) -> None:
        producer = KafkaProducer(**self.client.producer())
        for partition in range(PARTITIONS):
            for value in values:
                producer.send(f"{self._run}-in", f"{partition}{value}".encode(), partition=partition)
        producer.flush()
        producer.close()

    def start(self, shard: int, shards: int) -> Session:
        return self._opened(self.config(shard, shards))

    def copy(self, session: Session, count: int) -> list[str]:
        """Copy the next `count` records in one transaction; what they were."""
        records: list[Any] = []
        while len(records) < count:
            records += session.poll(1.0)
        outputs = [Outgoing(f"{self._run}-out", each.partition, None, each.value, ()) for each in records]
        counts = dict(session.note.state)
        for each in records:
            counts[str(each.partition)] = counts.get(str(each.partition), 0) + 1
        session.commit(outputs, session.positions(), dict.fromkeys(session.ledger_ends, 0), counts)
        return sorted(each.value.decode() for each in records)

    def try_reshard(self, shards: int) -> int | None:
        return reshard(self.config, shards, split, KafkaClients(self.client))

    def reshard(self, shards: int) -> int | None:
        """Repeats a change that found a sealed note undecided, as `reshard_role` does: its marker comes later."""
        while True:
            try:
                began = self.try_reshard(shards)
            except SessionLost as lost:
                if "neither committed nor aborted" not in str(lost):
                    raise
                time.sleep(0.5)
            else:
                self.wait_for_notes()
                return began

    def wait_for_notes(self) -> None:
        """Until the notes written so far count: the owner of a session that found them undecided opens another."""
        wait_for_markers(self.client, f"{self._run}-restore")


def split(states: Sequence[Mapping[str, Any]], own: Mapping[str, Any], shard: int, shards: int) -> Mapping[str, Any]:
    counts = {name: count for state in states for name, count in state.items()}
    return {name: count for name, count in counts.items() if int(name) % shards == shard}


@pytest.fixture
def role(broker: Broker, run_id: str, opened: Open) -> Role:
    return Role(broker, run_id, opened)


def test_last_notes_contain_undecided_ones_if_wanted(role: Role) -> None:
    """A record may be visible before the commit note of its transaction counts."""
    role.start(0, 1)
    role.wait_for_notes()
    config = role.config(0, 1)
    value, headers = encode(CommitNote(config.group, Note(1, {}, {"number": 7}, commit=9).encode(), 0))
    place = TopicPartition(*config.restore)
    with (
        closing(KafkaProducer(**role.client.producer(transactional_id=f"{config.group}-open"))) as producer,
        closing(uncommitted_consumer(role.client)) as observer,
    ):
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(config.restore.topic, value, config.group.encode(), list(headers), 0)
        producer.flush()
        found = [last_notes(observer, place, config.group, undecided=each) for each in (False, True)]
        producer.abort_transaction()
        assert [notes[config.group].state for notes in found] == [{}, {"number": 7}]


def test_new_shards_continue_where_the_old_ones_stopped(role: Role) -> None:
    role.feed("a")
    assert role.copy(role.start(0, 1), 4) == ["0a", "1a", "2a", "3a"]
    assert role.reshard(3) == 1
    role.feed("b")
    three = [role.start(shard, 3) for shard in range(3)]
    assert [session.note.state for session in three] == [{"0": 1, "3": 1}, {"1": 1}, {"2": 1}]
    assert [sorted(record.value for record in session.ledger) for session in three] == [
        [b"0a", b"3a"],
        [b"1a"],
        [b"2a"],
    ]
    assert [role.copy(each, count) for each, count in zip(three, (2, 1, 1), strict=True)] == [
        ["0b", "3b"],
        ["1b"],
        ["2b"],
    ]
    assert role.reshard(2) == 3
    role.feed("c")
    two = [role.start(shard, 2) for shard in range(2)]
    assert [role.copy(each, 2) for each in two] == [["0c", "2c"], ["1c", "3c"]]
    assert role.reshard(3) == 2
    again = [role.start(shard, 3) for shard in range(3)]
    assert [session.note.state for session in again] == [{"0": 3, "3": 3}, {"1": 3}, {"2": 3}]
    assert again[2].start > three[2].start, "a start number is never used twice"


@pytest.mark.parametrize("shards", [1, 2])
def test_number_that_was_fixed_is_not_changed(role: Role, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notes of such a role record one shard. One that read all partitions would read again what the second had."""
    divided = role.config
    with monkeypatch.context() as fixed:
        fixed.setattr(role, "config", lambda shard, shards: replace(divided(shard, shards), shards=1))
        role.feed("a")
        assert [role.copy(role.start(shard, 2), 2) for shard in range(2)] == [["0a", "2a"], ["1a", "3a"]]
    with pytest.raises(OtherLayout, match=r"is fixed, as the run began without max_shards .* are of 2 shards"):
        role.reshard(shards)


def test_notes_of_new_shards_have_a_release(role: Role) -> None:
    role.feed("a")
    role.copy(role.start(0, 1), 4)
    role.reshard(2)
    with closing(uncommitted_consumer(role.client)) as observer:
        place = TopicPartition(*role.config(0, 2).restore)
        found = [each for each in read_to_end(observer, place, None) if isinstance(each, RecordBatch)]
    headers = {each.keys[-1].decode(): each.headers[-1] for each in found if each.transactional}
    assert [NOTE_HEADER in headers[role.config(shard, 2).group] for shard in range(2)] == [True, True]


def test_new_shard_reads_again_what_one_of_the_old_ones_had_not(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shards may read the same partition, and write to the same ledger."""
    divided = role.config

    def shared(shard: int, shards: int) -> SessionConfig:
        own = divided(shard, shards)
        return replace(own, inputs=divided(0, 1).inputs, ledger=divided(0, 1).ledger)

    monkeypatch.setattr(role, "config", shared)
    role.feed("a", "b")
    first, second = role.start(0, 2), role.start(1, 2)
    records: list[Any] = []
    while len(records) < 2 * PARTITIONS:
        records += first.poll(1.0)
    outputs = [Outgoing(f"{each.topic[:-3]}-out", each.partition, None, each.value, ()) for each in records]
    first.commit(outputs, first.positions(), dict.fromkeys(first.ledger_ends, 2), {})
    second.commit([], dict.fromkeys(second.positions(), 1), dict.fromkeys(second.ledger_ends, 1), {})
    assert role.reshard(1) == 2
    alone = role.start(0, 1)
    assert set(alone.positions().values()) == {1}
    assert sorted(record.value for record in alone.ledger) == [b"0b", b"1b", b"2b", b"3b"]


def test_transaction_of_a_killed_shard_holds_no_other_up(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hide the ledger that they share until Kafka aborts it, after the transaction time-out."""
    divided = role.config
    ledger = divided(0, 1).ledger
    monkeypatch.setattr(role, "config", lambda shard, shards: replace(divided(shard, shards), ledger=ledger))
    monkeypatch.setattr(infra.kafka.session, "CATCH_UP_S", 20 - divided(0, 1).transaction_timeout_s)
    role.start(0, 2)
    killed = role.start(1, 2)
    killed._producer.begin([])
    killed._producer.send(ledger[0].topic, b"open", None, [], ledger[0].partition)
    killed._producer.flush()
    assert role.reshard(1) == 2


def test_reshard_is_repeated_until_sealed_notes_are_visible(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator may still be writing their markers: new notes would be older than the sealed ones."""
    role.feed("a")
    role.copy(role.start(0, 1), 4)
    before = infra.kafka.resharding.role_notes
    with monkeypatch.context() as slow:
        seen: list[Any] = []

        def first_seen(*place: Any) -> Any:
            seen.append(before(*place))
            return seen[0]

        slow.setattr(infra.kafka.resharding, "role_notes", first_seen)
        with pytest.raises(SessionLost, match="a sealed note is neither committed nor aborted"):
            role.try_reshard(2)
    assert role.reshard(2) == 1
    assert role.start(0, 2).note.state == {"0": 1, "2": 1}


def test_reshard_changes_nothing_in_the_same_layout_or_a_new_run(role: Role) -> None:
    assert role.reshard(2) is None
    session = role.start(0, 2)
    assert role.reshard(2) is None
    role.feed("a")
    assert role.copy(session, 2) == ["0a", "2a"], "it was not fenced"


def test_start_with_another_number_of_shards_is_rejected(role: Role) -> None:
    role.start(0, 2)
    with pytest.raises(OtherLayout, match=r"number of shards is 2, .* but 1 here"):
        role.start(0, 1)
    with pytest.raises(OtherLayout, match=r"number of shards is 2, .* but 3 here"):
        role.start(2, 3)
    assert role.start(1, 2).start == 1, "a shard that has not started yet has the layout of the others"


def test_old_shard_cannot_commit_or_start_after_the_change(role: Role) -> None:
    role.feed("a")
    old = role.start(0, 1)
    role.reshard(2)
    with pytest.raises(SessionLost):
        role.copy(old, 4)
    with pytest.raises(OtherLayout):
        role.start(0, 1)
    assert role.copy(role.start(0, 2), 2) == ["0a", "2a"]


def test_interrupted_change_is_repeated(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    role.feed("a")
    role.copy(role.start(0, 1), 4)
    with monkeypatch.context() as patch:
        patch.setattr(infra.kafka.resharding, "_write", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            role.reshard(2)
    for shards in (1, 2):
        with pytest.raises(OtherLayout, match="is being changed"):
            role.start(0, shards)
    assert role.reshard(1) == 1, "back to the number of before"
    assert role.start(0, 1).note.state == {"0": 1, "1": 1, "2": 1, "3": 1}
    assert role.reshard(2) == 1
    assert role.start(1, 2).note.state == {"1": 1, "3": 1}


def test_shard_without_a_commit_is_resharded_too(role: Role) -> None:
    role.feed("a")
    role.copy(role.start(1, 2), 2)
    assert role.reshard(1) == 2
    session = role.start(0, 1)
    assert role.copy(session, 2) == ["0a", "2a"]
    assert session.positions() == {Partition(f"{role._run}-in", each): 1 for each in range(PARTITIONS)}


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
