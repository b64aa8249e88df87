"""A reader that imports nothing of Laminar decodes a topic with the schemas in the topic `schemas`."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from exported_topics import Topics
from kafka import KafkaProducer
from record_samples import SAMPLES

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.topic_reader import read_topic
from pipelines.run.topics import publish_schemas, settings_of
from schemas.arrow import arrow_schema
from schemas.codec import RECORD_TYPES, encode, record_type
from schemas.records import Experience, RecordSchema
from schemas.topics import CATALOGUE, EXPERIENCES, SCHEMAS

ROOT = Path(__file__).parents[2]
READER = ROOT / "docs" / "decode_topic.py"
PAGE = ROOT / "docs" / "topics.md"


def schema(*words: str) -> subprocess.CompletedProcess[bytes]:
    program = "from pipelines.cli.main import main; main()"
    command = [sys.executable, "-c", program, "topics", "schema", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)


def create_schemas(topics: Topics) -> None:
    with admin_client(topics.client) as admin:
        create_topics(admin, [TopicSpec(SCHEMAS.name(topics.run), 1, config=settings_of(SCHEMAS))])
    publish_schemas(topics.client, topics.run)


def read(topics: Topics, folder: Path, *columns: str) -> list[dict[str, Any]]:
    """What the reader prints of the topic experiences."""
    create_schemas(topics)
    words = [topics.client.bootstrap_servers, EXPERIENCES.name(topics.run), *columns]
    command = [sys.executable, "-I", str(READER), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_other_reader_decodes_experiences(topics: Topics, tmp_path: Path) -> None:
    topics.write(range(3))
    rows = read(topics, tmp_path, "trajectory.prompt.number", "trajectory.member", "reward")
    assert sorted((row["trajectory.prompt.number"], row["trajectory.member"], row["reward"]) for row in rows) == [
        (number, member, 1.0 - member) for number in range(3) for member in range(2)
    ]
    assert "import schemas" not in READER.read_text()


def test_ten_lines_of_the_topics_page_decode_every_record(topics: Topics, tmp_path: Path) -> None:
    """Records of Arrow and JSON, committed alone: a transaction that was aborted is not shown."""
    code = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```\n")[0]
    assert len([line for line in code.splitlines() if line]) <= 10
    create_schemas(topics)
    topics.write(range(1))
    topics.write(range(1, 2), commit=False)
    with KafkaProducer(bootstrap_servers=topics.client.bootstrap_servers) as producer:
        for sample in SAMPLES.values():
            value, headers = encode(sample)
            producer.send(EXPERIENCES.name(topics.run), value, b"k", list(headers))
    command = [sys.executable, "-I", "-c", code, topics.client.bootstrap_servers, topics.run, "experiences"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    shown = [line.partition(" ") for line in done.stdout.splitlines()]
    assert {name for name, _, _ in shown} == {record_type(kind).schema for kind in SAMPLES}
    experiences = "".join(rows for name, _, rows in shown if name == record_type(Experience).schema)
    assert "'trajectory.prompt.task': 'sums', " in experiences
    assert "'trajectory.prompt.number': 1, " not in experiences


def test_other_reader_names_a_broker_or_topic_that_is_missing(topics: Topics, tmp_path: Path) -> None:
    def fails(*words: str) -> str:
        command = [sys.executable, "-I", str(READER), *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        return done.stderr

    with socket.socket() as silent:  # it does not listen, and nobody else can have its port
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        error = fails(address, EXPERIENCES.name(topics.run))
    assert error.startswith(f"no broker can be connected to: {address}: ")
    assert "`laminar broker start --folder runs/NAME/kafka` starts it again" in error
    servers = topics.client.bootstrap_servers
    assert fails(servers, "laminar.none.settled").startswith("there is no topic laminar.none.schemas")
    assert fails(servers).startswith("Print the records of any topic")


def test_other_reader_decodes_every_record(topics: Topics, tmp_path: Path) -> None:
    """By its header, whatever the topic is."""
    with KafkaProducer(bootstrap_servers=topics.client.bootstrap_servers) as producer:
        for sample in SAMPLES.values():
            value, headers = encode(sample)
            producer.send(EXPERIENCES.name(topics.run), value, b"k", list(headers))
        producer.send(EXPERIENCES.name(topics.run), None, b"deleted")
    rows = read(topics, tmp_path)
    assert {row["schema"] for row in rows} >= {record_type(kind).schema for kind in SAMPLES if kind is not RecordSchema}
    assert all(len(row) > 1 for row in rows)


def test_schemas_topic_has_every_record_under_its_name(topics: Topics) -> None:
    create_schemas(topics)
    records = {record.key: record.rows for record in read_topic(topics.client, SCHEMAS.name(topics.run))}
    assert set(records) == {entry.schema.encode() for entry in RECORD_TYPES}
    for entry in RECORD_TYPES:
        (row,) = records[entry.schema.encode()]
        assert (row.schema, row.encoding) == (entry.schema, entry.encoding)
        if entry.encoding == "arrow":
            assert pa.ipc.open_stream(row.arrow).schema.equals(arrow_schema(entry.kind))


def test_schema_command_prints_the_arrow_schema() -> None:
    printed = schema("experiences", "-O", "arrow").stdout
    assert pa.ipc.open_stream(printed).schema.equals(arrow_schema(Experience))


@pytest.mark.parametrize("noun", ["experiences", "progress", "batch-assembly", "relay", "inbox"])
def test_schema_command_prints_every_record(noun: str) -> None:
    done = schema(noun, "-O", "json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert [each["schema"] for each in printed] == [record_type(kind).schema for kind in CATALOGUE[noun].record_classes]
    assert all(each["fields"] for each in printed)


def test_schema_command_rejects_a_record_of_another_topic() -> None:
    done = schema("progress", "-O", "arrow", "--record", "Trajectory")
    assert done.returncode == 2
    assert b"Progress" in done.stderr
