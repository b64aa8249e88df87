"""A start reads a bounded part of the log: the inputs of every role are in the table of bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from role_graphs import config_of_graphs, parts_of, with_all_inputs

from operators.io.config import ShardConfig
from operators.io.read_topics import ReadTopics
from pipelines.config import Config
from pipelines.restart_reads import LEDGER, OBSERVERS, READS
from pipelines.roles import ALL_PIPELINES
from schemas.topics import CATALOGUE, METRICS, PAUSE, PLACEMENT, RELAY, REPLICAS


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    return config_of_graphs(tmp_path, monkeypatch)


def shards_of(config: Config, role: str) -> Iterator[ShardConfig]:
    for part in parts_of(config, role):
        if isinstance(part.transform, ReadTopics):
            yield from part.transform.shards


def reads_of(shard: ShardConfig) -> set[tuple[str, str]]:
    return {(r.topic.short_name, "") for r in shard.inputs} | {(topic.short_name, LEDGER) for topic, _ in shard.ledger}


@pytest.mark.parametrize("role", ALL_PIPELINES)
def test_restart_reads_lists_all_inputs_of_a_role(config: Config, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_all_inputs(config, role, monkeypatch)
    shard, *others = shards_of(config, role)
    assert all(reads_of(each) == reads_of(shard) for each in others)
    assert reads_of(shard) == set(READS[role])


@pytest.mark.parametrize("role", ALL_PIPELINES)
def test_roles_do_not_read_growing_topics_from_the_beginning(config: Config, role: str) -> None:
    for shard in shards_of(config, role):
        for reading in shard.inputs:
            assert reading.start != "earliest" or reading.topic.retention == "newest", reading.topic.short_name
            if reading.start == "committed" and role in ("rollout", "relay"):
                assert reading.newest is not None, "a new process has no committed offset"


def test_autoscaler_reads_the_metrics_that_it_measures_by(config: Config) -> None:
    (shard,) = shards_of(config, "autoscaler")
    assert {each.keys for each in shard.inputs if each.topic is METRICS} == {("trainer", PAUSE, PLACEMENT)}


def test_restart_reads_lists_all_topics_of_observers() -> None:
    assert set(OBSERVERS) == {METRICS.short_name, RELAY.short_name, REPLICAS.short_name}


def test_compacted_topics_have_newest_retention() -> None:
    assert [t.short_name for t in CATALOGUE.values() if (t.cleanup == "compact") != (t.retention == "newest")] == []
