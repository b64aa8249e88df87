"""Read-only commands on topics of release 0.1.0 end with exit code 1 and name the release that reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kafka import KafkaProducer

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from schemas.topics import CATALOGUE, PREFIX

RUN = "old-release"


@pytest.fixture(scope="module")
def old_topics(broker: Broker) -> None:
    """The topics of a run of release 0.1.0, as far as they have the same names, and one more."""
    client = ClientProperties.at(broker.bootstrap_servers)
    with admin_client(client) as admin:
        names = [topic.name(RUN) for topic in CATALOGUE.values()]
        create_topics(admin, [TopicSpec(name, 1) for name in (*names, f"{PREFIX}.{RUN}.offers")])
    producer = KafkaProducer(**client.producer())
    for topic in CATALOGUE.values():
        headers = [("laminar-schema", f"{topic.record_names[0]}/1".encode())]
        producer.send(topic.name(RUN), b"{}", key=b"p0", headers=headers)
    producer.flush()
    producer.close()


@pytest.mark.parametrize(
    "words",
    [
        ["topics", "tail", "trajectories"],
        ["topics", "find", "settled", "-w", "tokens > 0"],
        ["topics", "stats", "experiences"],
        ["topics", "dlq", "list"],
        ["trajectory", "p0.0"],
        ["lineage", "1.1"],
        ["weights", "list"],
        ["plans"],
        ["replicas"],
        ["relays"],
        ["watch", "--json"],
        ["trace"],
        ["metrics", "serve"],
    ],
    ids=" ".join,
)
def test_command_names_the_release_of_old_topics(
    words: list[str],
    old_topics: None,
    laminar: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # `trace` writes a file
    code, out, error = laminar(*words, "--run", RUN)
    assert (code, out) == (1, ""), error
    assert "was written by release 0.1.0: use release 0.1.0 for this run" in error
