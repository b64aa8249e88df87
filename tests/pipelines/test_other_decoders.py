"""A reader that imports nothing of Laminar decodes a topic with the schema that `laminar topics schema` prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from exported_topics import Topics

from schemas.codec import record_type
from schemas.topics import CATALOGUE, EXPERIENCES

ROOT = Path(__file__).parents[2]
READER = ROOT / "docs" / "decode_topic.py"


def schema(*words: str) -> subprocess.CompletedProcess[bytes]:
    program = "from pipelines.cli.main import main; main()"
    command = [sys.executable, "-c", program, "topics", "schema", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)


def test_other_reader_decodes_experiences(topics: Topics, tmp_path: Path) -> None:
    topics.write(range(3))
    file = tmp_path / "experiences.arrow-schema"
    file.write_bytes(schema("experiences", "-O", "arrow").stdout)
    words = [topics.client.bootstrap_servers, EXPERIENCES.name(topics.run), str(file)]
    command = [sys.executable, "-I", str(READER), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted((row["trajectory.prompt.number"], row["trajectory.member"], row["reward"]) for row in rows) == [
        (number, member, 1.0 - member) for number in range(3) for member in range(2)
    ]
    assert "import schemas" not in READER.read_text()


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
