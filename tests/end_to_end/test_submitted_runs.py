"""Commands find the Kafka of a run of `laminar submit --detach` from its folder, in any working directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from first_day import Shell
from kafka import KafkaProducer
from laminar_runs import CommandServer
from record_samples import SAMPLES

from infra.kafka.broker import Broker, free_port
from pipelines.config import KafkaConfig, parse_config, save_config
from pipelines.inspect.submissions import Submission
from pipelines.run.topics import make_topics
from schemas.codec import encode
from schemas.records import Experience, Metric
from schemas.topics import EXPERIENCES, METRICS

SCORED = next(each for each in SAMPLES.values() if isinstance(each, Experience))


@pytest.fixture
def submitted(broker: Broker, run_id: str, tmp_path: Path) -> Path:
    """A run whose score was submitted and has ended; its topics have three optimizer steps and an experience."""
    settings = {"name": run_id, "folder": str(tmp_path / "elsewhere")}
    table: dict[str, Any] = {"run": settings, "kafka": {"bootstrap_servers": broker.bootstrap_servers}}
    config = parse_config({**table, "trainer": {"optimizer_steps": 7}}, "test")
    make_topics(config)
    submission = Submission(config.run_folder, "score", 0, "embedded", pid=2**22 + 5, state="ended")
    submission.file.parent.mkdir(parents=True)
    submission.write()
    save_config(config, submission.config)
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers)
    records = [(METRICS, Metric("trainer", step, {"reward/mean": 0.5}, 1000 * step)) for step in (1, 2, 3)]
    for topic, record in [*records, (EXPERIENCES, replace(SCORED, error=None))]:
        value, headers = encode(record)
        producer.send(topic.name(run_id), value, b"k", list(headers), 0)
    producer.flush()
    producer.close()
    return config.run_folder


@pytest.fixture
def shell(command_server: CommandServer, tmp_path: Path) -> Shell:
    """In another directory than the runs."""
    (tmp_path / "outputs").mkdir()
    return Shell(command_server, tmp_path / "here", tmp_path / "outputs")


def test_commands_find_the_kafka_of_a_submitted_run(submitted: Path, run_id: str, shell: Shell) -> None:
    """From any directory, and in the one above the runs without a name."""
    for here, place in (
        (shell.here, ("--run", str(submitted))),
        (submitted.parent.parent, ("--run", f"elsewhere/{run_id}")),
    ):
        answer = shell("runs", "status", *place, "--json", here=here)
        assert answer.code == 0, answer.text
        status = answer.json
        assert (status["run"], status["optimizer_steps"], status["goal"], status["kafka"]) == (run_id, 3, 7, None)
        assert "3/7 steps" in shell("runs", "status", *place, here=here).text
        assert "3/7 steps" in shell("watch", "--plain", *place, here=here).text
        for words in (("topics", "lag"), ("topics", "tail", "experiences"), ("runs", "audit"), ("samples", "p12")):
            answer = shell(*words, *place, here=here)
            assert answer.code in (0, 1), answer.text  # 1: the audit of an experience without a prompt
            assert "bootstrap" not in answer.text, words
        assert "p12  chain_sum, 1 of 8 samples" in answer.text


def test_status_of_a_submitted_run_names_unreachable_kafka(submitted: Path, shell: Shell) -> None:
    file = submitted / "submitted" / "score.toml"
    config = parse_config({"run": {"name": submitted.name, "folder": str(submitted.parent)}}, "test")
    address = f"127.0.0.1:{free_port()}"
    save_config(replace(config, kafka=KafkaConfig(bootstrap_servers=address)), file)
    answer = shell("runs", "status", "--run", str(submitted), "--json")
    assert answer.code == 0
    assert address in answer.json["kafka"]
    assert "Kafka does not respond" in shell("runs", "status", "--run", str(submitted)).text
