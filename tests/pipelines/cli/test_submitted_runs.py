"""Commands find the Kafka of a run of `laminar submit --detach` from its folder, in any working directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer
from record_samples import SAMPLES

from infra.kafka.broker import Broker, free_port
from pipelines.cli.main import main
from pipelines.config import KafkaConfig, parse_config, save_config
from pipelines.inspect.submissions import Submission
from pipelines.run.topics import make_topics
from schemas.codec import encode
from schemas.records import Experience, Metric
from schemas.topics import EXPERIENCES, METRICS

Laminar = Callable[..., tuple[int, str, str]]
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
def laminar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Laminar:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return call


def test_commands_find_the_kafka_of_a_submitted_run(submitted: Path, run_id: str, laminar: Laminar) -> None:
    place = ("--run", str(submitted))
    code, out, err = laminar("runs", "status", *place, "--json")
    assert code == 0, err
    status = json.loads(out)
    assert (status["run"], status["optimizer_steps"], status["goal"], status["kafka"]) == (run_id, 3, 7, None)
    assert "3/7 steps" in laminar("runs", "status", *place)[1]
    assert "3/7 steps" in laminar("watch", "--plain", *place)[1]
    for words in (("topics", "lag"), ("topics", "tail", "experiences"), ("runs", "audit"), ("samples", "p12")):
        code, out, err = laminar(*words, *place)
        assert code in (0, 1), err  # 1: the audit of an experience without a prompt
        assert "bootstrap" not in err, words
    assert "p12  chain_sum, 1 of 8 samples" in out


def test_status_of_a_submitted_run_names_unreachable_kafka(submitted: Path, laminar: Laminar) -> None:
    file = submitted / "submitted" / "score.toml"
    config = parse_config({"run": {"name": submitted.name, "folder": str(submitted.parent)}}, "test")
    address = f"127.0.0.1:{free_port()}"
    save_config(replace(config, kafka=KafkaConfig(bootstrap_servers=address)), file)
    code, out, _ = laminar("runs", "status", "--run", str(submitted), "--json")
    assert code == 0
    assert address in json.loads(out)["kafka"]
    assert "Kafka does not respond" in laminar("runs", "status", "--run", str(submitted))[1]
