"""A shard whose note, input or output is gone refuses to start, with an error that says how to recover."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kafka import KafkaProducer, TopicPartition
from shard_sessions import Open, feed, polled, record, source

from infra.kafka.admin import TopicSpec, admin_client, create_topics, delete_topics, end_offsets
from infra.kafka.log_gaps import LogTruncated, NoteMissing
from infra.kafka.session import Partition
from infra.kafka.session_config import SessionConfig
from schemas.release import OldRelease


def test_session_rejects_output_without_note(config: SessionConfig, opened: Open) -> None:
    config = replace(config, owned=config.ledger)
    first = opened(config)
    first.commit([record(config, b"A")], {}, {}, {})
    first.close()
    with admin_client(config.client) as admin:
        delete_topics(admin, config.restore.topic)
        create_topics(admin, [TopicSpec(config.restore.topic, 1)])
    with pytest.raises(NoteMissing, match=f"no note in {config.restore.topic}, but {config.ledger[0].topic}:0 holds"):
        opened(config)


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
    with admin_client(config.client) as admin:
        delete_topics(admin, config.ledger[0].topic)
        create_topics(admin, [TopicSpec(config.ledger[0].topic, 1)])
    with pytest.raises(LogTruncated, match="ends at 0, before its own output at 0"):
        opened(config)


def test_session_rejects_topics_of_old_release(config: SessionConfig, opened: Open) -> None:
    producer = KafkaProducer(**config.client.producer())
    note = {"value": b"{}", "headers": [("laminar-schema", b"CommitNote/1")], "partition": 0}
    producer.send(config.restore.topic, key=b"another group", **note)
    producer.flush()
    producer.close()
    with admin_client(config.client) as admin:
        before = end_offsets(admin, [config.restore.topic])
        with pytest.raises(OldRelease, match=r"CommitNote/1 record was written by release 0\.1\.0"):
            opened(config)
        assert end_offsets(admin, [config.restore.topic]) == before


def test_session_poll_raises_when_log_is_truncated(config: SessionConfig, opened: Open) -> None:
    feed(config, *(b"x" * 100 for _ in range(10)))
    session = opened(config)
    cut(config, source(config), 5)
    with pytest.raises(LogTruncated):
        polled(session, 10)
