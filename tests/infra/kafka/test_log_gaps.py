"""A shard whose note, input or output is gone refuses to start, with an error that says how to recover."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from kafka import KafkaProducer, TopicPartition
from kafka.errors import UnknownTopicOrPartitionError
from markers import wait_for_markers
from record_samples import SAMPLES
from shard_sessions import Open, feed, polled, record, source, visible

from infra.kafka.admin import TopicSpec, admin_client, create_topics, delete_records, delete_topics
from infra.kafka.group_offsets import set_group_offsets
from infra.kafka.log_gaps import LogTruncated, NoteMissing, check_topics
from infra.kafka.session import Partition, SessionLost
from infra.kafka.session_config import Input, ProcessHeartbeats, SessionConfig
from schemas.codec import Headers, encode
from schemas.records import RelayStatus, ReplicaStatus
from schemas.release import OldRelease

BEAT = SAMPLES[ReplicaStatus]
"""Of start 4 of process 0 of run "first"."""


@pytest.fixture
def without_note(config: SessionConfig, opened: Open) -> SessionConfig:
    """A shard that has committed an output and an input's position, and whose topic of notes was lost."""
    feed(config, b"a", b"b")
    first = opened(config)
    ledger = first.commit([record(config, b"A")], {source(config): 1}, {}, {})
    first.commit([record(config, b"B")], {source(config): 2}, ledger, {}, last=True)
    first.close()
    with admin_client(config.client) as admin:
        delete_topics(admin, config.restore.topic)
        create_topics(admin, [TopicSpec(config.restore.topic, 1)])
    return config


def test_session_rejects_output_without_note(without_note: SessionConfig, opened: Open) -> None:
    config = replace(without_note, owned=without_note.ledger)
    with pytest.raises(NoteMissing, match=f"no note in {config.restore.topic}, but {config.ledger[0].topic}:0 holds"):
        opened(config)


def test_session_rejects_group_offsets_without_note(without_note: SessionConfig, opened: Open) -> None:
    """The output's topic has other writers: only the group's offsets show that this shard has committed."""
    with pytest.raises(NoteMissing, match=f"committed offset 2 in {source(without_note).topic}:0: a start without it"):
        opened(without_note)


def test_session_rejects_trimmed_ledger_without_note(without_note: SessionConfig, opened: Open) -> None:
    """Kafka has deleted the group's offsets, as it does after a week."""
    cut(without_note, without_note.ledger[0], 1)
    with admin_client(without_note.client) as admin:
        admin.delete_groups([without_note.group])
    with pytest.raises(NoteMissing, match=f"{without_note.ledger[0].topic}:0 has been trimmed.*weights pull"):
        opened(without_note)


def test_session_rejects_own_keys_without_note(without_note: SessionConfig, opened: Open) -> None:
    """Others write to the ledger, with other keys, and Kafka has deleted the group's offsets."""
    with admin_client(without_note.client) as admin:
        admin.delete_groups([without_note.group])
    producer = KafkaProducer(**without_note.client.producer())
    for key in (b"i0", b"p0"):
        producer.send(without_note.ledger[0].topic, b"a row", key)
    producer.flush()
    producer.close()
    with pytest.raises(NoteMissing, match=f"{without_note.ledger[0].topic}:0 holds its output"):
        opened(replace(without_note, ledger_keys=rb"[pe]\d+"))
    assert opened(replace(without_note, ledger_keys=rb"x\d+")).start == 1


def heartbeats_of(config: SessionConfig, *beats: tuple[bytes, bytes | None, Headers]) -> SessionConfig:
    """`config` of process 0 of run "first", whose topic of heartbeats has `beats`: keys, values and headers."""
    place = Partition(f"{config.group}-replicas", 0)
    with admin_client(config.client) as admin:
        create_topics(admin, [TopicSpec(place.topic, 1, config={"cleanup.policy": "compact"})])
    producer = KafkaProducer(**config.client.producer())
    for key, value, headers in beats:
        producer.send(place.topic, value, key, headers=list(headers))
    producer.flush()
    producer.close()
    return replace(config, heartbeats=ProcessHeartbeats(place, "first", 0))


def test_session_rejects_own_heartbeats_without_note(without_note: SessionConfig, opened: Open) -> None:
    """Its outputs have other writers, and Kafka has deleted the group's offsets."""
    with admin_client(without_note.client) as admin:
        admin.delete_groups([without_note.group])
    config = heartbeats_of(without_note, (b"rollout-0", *encode(BEAT)), (b"relay-0", *encode(SAMPLES[RelayStatus])))
    with pytest.raises(
        NoteMissing, match=f"{config.group}-replicas:0 holds a heartbeat of its start 4: .*weights pull"
    ):
        opened(config)


def test_first_session_starts_beside_heartbeats_of_others(config: SessionConfig, opened: Open) -> None:
    """Other processes, one of which had this one's replica, another run, and other programs."""
    config = heartbeats_of(
        config,
        (b"rollout-0", *encode(replace(BEAT, process=1))),
        (b"rollout-1", *encode(replace(BEAT, run="second"))),
        (b"relay-0", *encode(SAMPLES[RelayStatus])),
        (b"rollout-2", b"{", encode(BEAT)[1]),
        (b"rollout-3", b"{}", (("laminar-schema", b"ReplicaStatus/1"),)),
        (b"rollout-4", None, ()),
    )
    assert opened(config).start == 1


def test_session_with_a_note_starts_beside_its_heartbeats(config: SessionConfig, opened: Open) -> None:
    """As after `laminar topics reset`, which writes a note."""
    opened(config).close()
    config = heartbeats_of(config, (b"rollout-0", *encode(BEAT)))
    feed(config, b"a")
    set_group_offsets(config.client, config.group, source(config).topic, {0: 1}, config.restore, 60.0)
    session = opened(config)
    assert (session.start, session.positions()) == (2, {source(config): 1})


def test_session_names_a_deleted_topic_of_heartbeats(config: SessionConfig, opened: Open) -> None:
    config = replace(config, heartbeats=ProcessHeartbeats(Partition(f"{config.group}-replicas", 0), "first", 0))
    with pytest.raises(SessionLost, match=f"there is no topic {config.group}-replicas.*deleted"):
        opened(config)


def test_first_session_starts_on_a_ledger_with_other_writers(config: SessionConfig, opened: Open) -> None:
    producer = KafkaProducer(**config.client.producer())
    producer.send(config.ledger[0].topic, b"imported")
    producer.flush()
    producer.close()
    assert [found.value for found in opened(config).ledger] == [b"imported"]


def cut(config: SessionConfig, place: Partition, offset: int) -> None:
    with admin_client(config.client) as admin:
        admin.delete_records({TopicPartition(*place): offset})


def test_session_rejects_input_truncated_after_position(config: SessionConfig, opened: Open) -> None:
    feed(config, b"a", b"b", b"c")
    opened(config).commit([], {source(config): 1}, {}, {})
    cut(config, source(config), 2)
    with pytest.raises(LogTruncated, match="partition 0, begins at offset 2, after 1"):
        opened(config)


def test_session_rejects_ledger_truncated_after_floor(config: SessionConfig, opened: Open) -> None:
    session = opened(config)
    first = session.commit([record(config, b"A")], {}, {}, {})
    session.commit([record(config, b"B")], {}, first, {})
    cut(config, config.ledger[0], 2)
    with pytest.raises(LogTruncated, match="begins at offset 2, after 0"):
        opened(config)


def test_session_rejects_log_without_its_output(config: SessionConfig, opened: Open) -> None:
    session = opened(config)
    session.commit([record(config, b"A")], {}, {}, {})
    session.close()
    wait_for_markers(config.client, config.ledger[0].topic, config.restore.topic)  # else they would be in the new topic
    with admin_client(config.client) as admin:
        delete_topics(admin, config.ledger[0].topic)
        create_topics(admin, [TopicSpec(config.ledger[0].topic, 1)])
    with pytest.raises(LogTruncated, match="ends at 0, before its own output at 0"):
        opened(config)


def test_session_rejects_topics_of_old_release(config: SessionConfig, opened: Open) -> None:
    producer = KafkaProducer(**config.client.producer(transactional_id=f"{config.group}-old"))
    producer.init_transactions()
    producer.begin_transaction()
    note = {"value": b"{}", "headers": [("laminar-schema", b"CommitNote/1")], "partition": 0}
    producer.send(config.restore.topic, key=b"another group", **note)
    producer.commit_transaction()
    producer.close()
    with pytest.raises(OldRelease, match=r"CommitNote/1 record was written by release 0\.1\.0"):
        opened(config)
    assert visible(config, config.restore.topic) == [b"{}"]


def test_session_poll_raises_when_log_is_truncated(config: SessionConfig, opened: Open) -> None:
    feed(config, *(b"x" * 100 for _ in range(10)))
    session = opened(config)
    cut(config, source(config), 5)
    with pytest.raises(LogTruncated):
        polled(session, 10)


def test_session_names_a_deleted_topic(config: SessionConfig, opened: Open) -> None:
    opened(config).close()
    with admin_client(config.client) as admin:
        delete_topics(admin, source(config).topic)
    with pytest.raises(SessionLost, match=f"there is no topic {source(config).topic}.*deleted"):
        opened(config)


def test_session_names_an_input_deleted_while_it_polls(config: SessionConfig, opened: Open) -> None:
    """A role that only reads gets no error from the log: polls of a deleted topic return nothing."""
    session = opened(config)
    session.poll(0)
    session.check_inputs()
    with admin_client(config.client) as admin:
        delete_topics(admin, source(config).topic)
    deadline = time.monotonic() + 60

    def poll() -> None:
        while time.monotonic() < deadline:
            session.poll(0.1)
            session.check_inputs()

    with pytest.raises(SessionLost, match=f"there is no topic {source(config).topic}.*deleted"):
        poll()


class Refreshing:
    """A consumer whose own refresh of the metadata was under way: it fails with the bare name of the topic."""

    def partitions_for_topic(self, topic: str) -> set[int]:
        raise UnknownTopicOrPartitionError(topic)


def test_check_topics_advises_after_a_refresh_under_way() -> None:
    with pytest.raises(UnknownTopicOrPartitionError, match=r"there is no topic gone.*deleted"):
        check_topics(Refreshing(), [TopicPartition("gone", 0)])


def test_noted_offset_may_be_lost_if_another_is_sought(config: SessionConfig, opened: Open) -> None:
    """A rank that comes back after a trim reads from its checkpoint on; without one it needs what it had not read."""
    feed(config, b"a", b"b", b"c")
    ranked = replace(config, inputs=(Input(source(config).topic, (0,), sought=True),))
    opened(ranked).commit([], {source(config): 1}, {}, {})
    with admin_client(config.client) as admin:
        delete_records(admin, {(source(config).topic, 0): 2})
    for _ in range(2):  # a start that fails does not hide it from the next
        with pytest.raises(LogTruncated, match="begins at offset 2, after 1"):
            opened(ranked).seek({})
    session = opened(ranked)
    session.seek({source(config): 2})
    assert polled(session, 1) == [b"c"]
    with pytest.raises(LogTruncated):
        opened(config)


def test_session_that_reads_the_newest_does_not_need_older_ones(
    config: SessionConfig, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """A trim does not wait for a process that may have left for good."""
    feed(config, b"a", b"b", b"c", b"d")
    newest = replace(config, inputs=(Input(source(config).topic, (0,), newest=2),))
    others = replace(config, group=f"{config.group}-2")
    newest, state = replace(newest, of_newest=("newest_manifest",)), {"mark": 7, "newest_manifest": [1, 0]}
    for each in (newest, others):
        opened(each).commit([], {source(config): 0}, {}, state)
    with admin_client(config.client) as admin:
        delete_records(admin, {(source(config).topic, 0): 1})
    opened(replace(newest, group=f"{config.group}-3"))  # it has read nothing yet, so it skips nothing
    returned = opened(newest)
    assert (returned.positions(), returned.note.state) == ({source(config): 2}, {"mark": 7})
    assert opened(newest).note.state == {"mark": 7}, "it is committed so"
    assert [each.getMessage() for each in caplog.records if each.name == "infra.kafka.input_positions"] == [
        f"{config.group}: offsets 0 to 1 of {source(config).topic}, partition 0, are skipped: the log begins at 1, and "
        "the newest suffice"
    ]
    with pytest.raises(LogTruncated):
        opened(others)
