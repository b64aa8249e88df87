"""Commands that only read a stopped run read the files of its log: the same answers as its broker gave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer
from role_writer import write_as_role
from trimmed_run import TrimmedRun

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker, BrokerConfig, start_broker
from operators.trainer.checkpoint import write_checkpoint
from operators.trainer.checkpoint_files import TrainerPosition
from operators.trainer.learner_state import LearnerState
from pipelines.cli.main import main
from pipelines.config import load_config, save_config
from pipelines.inspect.run_files import CONFIG_FILE, STATE_FILE
from schemas.codec import encode
from schemas.records import Metric, PolicyVersion
from schemas.release import RELEASE
from schemas.topics import EXPERIENCES, METRICS, REPLICAS, group_name

RUN = "stopped"
WRITER = group_name(RUN, "experience")


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """The broker of the run `runs/stopped`, of which version 1.2 has a checkpoint."""
    import torch

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / RUN
    folder.mkdir(parents=True)
    example = Path(__file__).parents[4] / "examples" / "chain_sum.toml"
    save_config(load_config(example, [f"run.name={RUN}", f"run.folder={folder.parent}"]), folder / CONFIG_FILE)
    state = LearnerState({"w": torch.zeros(2)}, {}, torch.get_rng_state(), 2, 0)
    write_checkpoint(folder / "checkpoints", state, TrainerPosition(PolicyVersion(1, 2), (2,), 8))
    with start_broker(BrokerConfig(folder / "kafka")) as started:
        state_file = {"run": RUN, "release": RELEASE, "bootstrap_servers": started.bootstrap_servers}
        (folder / STATE_FILE).write_text(json.dumps(state_file))
        yield started


def filled(broker: Broker) -> KafkaProducer:
    """Write the run's log, with a garbage record, and return a producer with an open transaction in `metrics`."""
    run = TrimmedRun(broker, RUN)
    with admin_client(run.client) as admin:
        create_topics(admin, [TopicSpec(topic.name(RUN), 1) for topic in (METRICS, REPLICAS)])
    run.train(3)
    run.commit_all()
    metrics = [Metric("trainer", step, {"reward/mean": step / 4}, 1_000 + step) for step in range(1, 4)]
    write_as_role(run.client, RUN, METRICS, metrics)
    run.producer.send(EXPERIENCES.name(RUN), b"garbage")
    run.producer.close()
    writer = KafkaProducer(**run.client.producer(transactional_id=WRITER))
    writer.init_transactions()
    writer.begin_transaction()
    value, headers = encode(Metric("trainer", 9, {}, 9))
    writer.send(METRICS.name(RUN), value, headers=list(headers)).get(10)
    return writer


def test_stopped_run_answers_without_a_broker(
    broker: Broker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*words: str) -> Any:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--json"])
        printed = capsys.readouterr()
        assert not ended.value.code, printed.err
        return json.loads(printed.out)

    def answers() -> dict[str, Any]:
        watched, trim = answer("watch"), answer("runs", "trim")
        (transaction,) = answer("topics", "transactions", "list")
        return {
            "watch": {name: watched[name] for name in ("optimizer_steps", "reward", "lag")},
            "trim": trim,
            "transaction": {name: transaction[name] for name in transaction.keys() - {"idle_s"}},
        }

    writer = filled(broker)
    expected = answers()
    assert (expected["watch"]["optimizer_steps"], expected["watch"]["reward"]) == (3, 0.75)
    assert (expected["trim"]["version"], expected["trim"]["executed"]) == ("1.2", False)
    assert (expected["transaction"]["transactional_id"], expected["transaction"]["state"]) == (WRITER, "Ongoing")
    broker.stop()
    writer.close(timeout=0)
    monkeypatch.setattr("infra.kafka.broker.start_broker", None)
    monkeypatch.setattr("infra.runners.run.run_pipeline", None)
    assert answers() == expected
    stopped = answer("watch")
    assert (stopped["phase"], stopped["waits_for"]) == ("died", None)
    exported = answer("export", "experiences", "exported")
    assert (exported["rows"], exported["undecodable"], exported["problems"]) == (18, 1, [])
    assert answer("export", "experiences", "exported")["rows"] == 18
    verified = answer("export", "verify", "exported", "--log")
    assert (verified["compared_with_log"], verified["problems"]) == (True, [])
