"""`laminar train replay` against a real broker: equal weights bit by bit, or other weights with another algorithm."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer, TopicPartition
from trainer_batches import make_batch, save_tiny_model, with_floats

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from operators.trainer.checkpoint import write_checkpoint
from operators.trainer.checkpoint_files import TrainerPosition
from operators.trainer.replay import Replay
from pipelines.config import load_config
from pipelines.inspect.metrics_file import read_metrics
from schemas.codec import encode
from schemas.records import Metric, PolicyVersion, TrimPoint
from schemas.topics import BATCHES, TRIM_POINTS

RUN, TRIMMED = "replayed", "replayed-trimmed"
CONFIG = """
[run]
name = "{name}"
[model]
path = "{model}"
[trainer]
optimizer_steps = 4
[trainer.learner]
learning_rate = 1e-2
"""
Laminar = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def runs(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(broker, RUN, tmp_path_factory.mktemp("runs"))


def make_run(broker: Broker, name: str, folder: Path) -> Path:
    """In `folder`, a run that has trained four of its five batches; the second batch is invalid.

    Between the batches are an undecodable record, a record of another class, a repeated batch, and one with a number
    far ahead; behind the last one is one that the buffer has not made.
    """
    run = folder / name
    run.mkdir()
    model = save_tiny_model(folder / "model")
    (run / "config.toml").write_text(CONFIG.format(name=name, model=model))
    parts = [part for number in range(5) for part in make_batch(seed=number, number=number, groups=2, parts=2)]
    parts[2] = with_floats(parts[2], "rewards", {0: float("nan")})
    invalid = [b"garbage", Metric("trainer", 1, {}, 0), parts[0], parts[1], replace(parts[0], batch=2**61)]
    produce(broker, name, [*parts[:4], *invalid, *parts[4:], replace(parts[0], batch=9)])
    trained = Replay(load_config(run / "config.toml").trainer, model)
    assert len(list(trained.train([(part, 0, offset) for offset, part in enumerate(parts)], 4))) == 4
    trained.save(run / "model")
    return folder


def produce(broker: Broker, run: str, parts: list[Any]) -> None:
    topic = BATCHES.name(run)
    with admin_client(ClientProperties.at(broker.bootstrap_servers)) as admin:
        create_topics(admin, [TopicSpec(topic, 1)])
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers)
    for part in parts:
        value, headers = (part, ()) if isinstance(part, bytes) else encode(part)
        producer.send(topic, value, headers=list(headers), partition=0)
    producer.close()


@pytest.fixture
def laminar(runs: Path, broker: Broker, command: Laminar) -> Laminar:
    """Call `laminar train replay`; return exit code, stdout and stderr."""

    return lambda *words: command("train", "replay", *words, "--folder", str(runs), "-b", broker.bootstrap_servers)


def test_train_replay_reproduces_weights(laminar: Laminar, runs: Path) -> None:
    code, out, _ = laminar(RUN, "--json")
    result = json.loads(out)
    assert (code, result["steps"], result["skipped_records"]) == (0, 4, 5)
    assert result["weights"] == result["run_weights"]
    assert "reward" in result["skipped_batches"]["1"]
    assert Path(result["model"]) == runs / RUN / "replay-1" / "model"
    assert (runs / RUN / "replay-1" / "model" / "config.json").exists()
    metrics = read_metrics(Path(result["metrics"]))
    assert [metric.step for metric in metrics] == [1, 3, 4]
    assert all("reward/mean" in metric.values for metric in metrics)


def test_train_replay_prints_equal_weights(laminar: Laminar, tmp_path: Path) -> None:
    code, out, _ = laminar(RUN, "--out", str(tmp_path / "again"))
    assert code == 0
    assert "bit by bit" in out
    assert "REWARD/MEAN" in out


def test_train_replay_with_other_algorithm_changes_weights(laminar: Laminar, tmp_path: Path) -> None:
    change = "trainer.learner.algorithm.name=cispo"
    code, out, _ = laminar(RUN, "--set", change, "--out", str(tmp_path / "other"), "--json")
    result = json.loads(out)
    assert (code, result["steps"], result["changes"]) == (0, 4, [change])  # the log has a fifth batch
    assert result["weights"] != result["run_weights"]
    assert 0 < result["weight_distance"] < 1


def test_latest_run_is_named_to_kafka(laminar: Laminar, runs: Path, tmp_path: Path, broker: Broker) -> None:
    with admin_client(ClientProperties.at(broker.bootstrap_servers)) as admin:
        create_topics(admin, [TopicSpec(BATCHES.name("another-run"), 1)])
    (runs / "latest").symlink_to(RUN)
    try:
        code, out, err = laminar("latest", "--out", str(tmp_path / "again"), "--json")
    finally:
        (runs / "latest").unlink()
    assert (code, json.loads(out)["run"] if code == 0 else err) == (0, RUN)


def test_replay_ends_before_a_batch_that_was_not_made(laminar: Laminar, tmp_path: Path) -> None:
    code, out, _ = laminar(RUN, "--set", "trainer.optimizer_steps=20", "--out", str(tmp_path / "all"), "--json")
    assert (code, json.loads(out)["steps"]) == (0, 5)


def test_train_replay_reports_how_far_the_weights_are(laminar: Laminar, runs: Path, tmp_path: Path) -> None:
    (runs / RUN / "metrics.jsonl").write_text('{"name": "trainer", "step": 3, "values": {}, "measured_at": 1}\n')
    try:
        out = laminar(RUN, "--set", "trainer.learner.learning_rate=1e-3", "--out", str(tmp_path / "less"))[1]
    finally:
        (runs / RUN / "metrics.jsonl").unlink()
    assert "3 steps in " in out  # the run ended there
    assert re.search(r"the weights differ from the run's by [\d.]+ % of the norm of the run's weights", out)
    assert "rewards are the run's" in out


def test_train_replay_reports_different_weights(laminar: Laminar, runs: Path, tmp_path: Path) -> None:
    own = runs / RUN / "model"
    own.rename(tmp_path / "own")
    shutil.copytree(runs / "model", own)
    try:
        code, out, _ = laminar(RUN, "--out", str(tmp_path / "again"))
    finally:
        shutil.rmtree(own)
        (tmp_path / "own").rename(own)
    assert code == 1
    assert "DIFFER FROM THE RUN'S" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "no run 'nowhere'"),
        ([RUN, "--set", "prompts.task=gcd"], "can change only trainer.*"),
        ([RUN, "--set", "trainer.learner.algorithm.name=ppo2"], "ppo2"),
        ([RUN, "--out", "."], "exists already"),
    ],
)
def test_train_replay_rejects_invalid_arguments(laminar: Laminar, words: list[str], message: str) -> None:
    code, _, err = laminar(*words)
    assert code != 0
    assert message in " ".join(err.replace("│", " ").split())


def test_train_replay_of_trimmed_log_begins_at_mark(broker: Broker, command: Laminar, tmp_path: Path) -> None:
    runs = make_run(broker, TRIMMED, tmp_path)
    run, client = runs / TRIMMED, ClientProperties.at(broker.bootstrap_servers)
    parts = [part for number in range(2) for part in make_batch(seed=number, number=number, groups=2, parts=2)]
    parts[2] = with_floats(parts[2], "rewards", {0: float("nan")})
    trained = Replay(load_config(run / "config.toml").trainer, runs / "model")
    list(trained.train([(part, 0, offset) for offset, part in enumerate(parts)], 2))
    position = TrainerPosition(PolicyVersion(1, 2), (4,), 4)
    write_checkpoint(run / "trim-points", trained._learner.state(), position)
    trim_point = TrimPoint(
        1, PolicyVersion(1, 2), 1, "trim-points/1.2", (), (), (), (), ("batches:0",), (4,), (4,), (9,), ("",), 0
    )
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(TRIM_POINTS.name(TRIMMED), 1)])
        admin.delete_records({TopicPartition(BATCHES.name(TRIMMED), 0): 4})
    with BoundedProducer(client) as producer:
        value, headers = encode(trim_point)
        producer.send(TRIM_POINTS.name(TRIMMED), value, headers=headers)
    words = ("train", "replay", TRIMMED, "--folder", str(runs), "-b", broker.bootstrap_servers)
    code, out, _ = command(*words, "--json")
    result = json.loads(out)
    assert (code, result["start_version"], result["steps"]) == (0, "1.2", 4)
    assert result["weights"] == result["run_weights"]
    assert "begins at version 1.2" in command(*words)[1]
