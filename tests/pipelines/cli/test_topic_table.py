"""The topic tables in the documents agree with the catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.present.topic_table import TABLES, marked, topic_table, writers_table
from schemas.topics import CATALOGUE

ROOT = Path(__file__).parents[3]


def test_topic_table_has_a_row_per_topic() -> None:
    head, rule, *rows = topic_table().splitlines()
    assert len(rows) == len(CATALOGUE)
    assert {line.count(" | ") for line in (head, rule, *rows)} == {7}
    for topic, row in zip(CATALOGUE.values(), rows, strict=True):
        assert f".{topic.short_name}`" in row
        assert topic.description in row


def test_topics_with_several_writers_explain_safety() -> None:
    several = {topic.short_name for topic in CATALOGUE.values() if topic.has_several_writers}
    assert {topic.short_name for topic in CATALOGUE.values() if topic.if_a_writer_dies} == several
    assert {"replicas", "inbox", "batches", "dead-letters", "relay", "control", "trim-points"} <= several
    assert not several & {"prompts", "relay-chain"}
    assert len(writers_table().splitlines()) == len(several) + 2


def test_heartbeat_topic_is_not_transactional() -> None:
    heartbeats = [topic for topic in CATALOGUE.values() if {"ReplicaStatus", "RelayStatus"} & set(topic.record_names)]
    assert [(topic.short_name, topic.transactional) for topic in heartbeats] == [("replicas", False)]


@pytest.mark.parametrize("name", TABLES)
def test_documents_contain_current_tables(name: str) -> None:
    text = (ROOT / "docs" / "topics.md").read_text(encoding="utf-8")
    assert marked(name) in text, "out of date: `make generated`"
