"""The settings that hosts get from Kafka: enough for rollouts and relays, without paths and secrets of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from trainer_batches import save_tiny_model

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.run_files import read_run_files
from pipelines.config import Config, parse_config, plain_table
from pipelines.run_files import SETTINGS_FILE, publish_run_files, settings_for_hosts
from pipelines.shards import partitions_of
from schemas.topics import CATALOGUE, RUN_FILES

SECRET = "/home/ada/secrets"
TABLE: dict[str, Any] = {
    "run": {"name": "first", "folder": f"{SECRET}/runs"},
    "kafka": {"bootstrap_servers": "kafka:9092", "client_properties": f"{SECRET}/{{role}}.properties", "partitions": 3},
    "model": {"path": f"{SECRET}/model"},
    "prompts": {"source": "jsonl", "path": f"{SECRET}/rows.jsonl", "environment": "Maze"},
    "score": {"shards": 2, "rewards": [{"name": f"{SECRET}/reward.py:score", "options": {"key": "sk-1"}}]},
    "experience": {"shards": 2, "max_shards": 3},
    "rollout": {"environments": [{"name": f"{SECRET}/maze.py:Maze"}, {"name": "calculator"}], "replicas": 2},
    "relay": {
        "listen": "10.1.2.3",
        "advertise": "10.1.2.3:99",
        "port": 99,
        "store": f"{SECRET}/store",
        "disk_folder": f"{SECRET}/copies",
        "object_store": f"{SECRET}/objects",
        **{name: f"{SECRET}/{name}" for name in ("token_file", "certificate_file", "authority_file")},
    },
    "trainer": {"checkpoint_folder": f"{SECRET}/checkpoints", "ranks": 2, "batch_shares": 4, "device": "cuda"},
    "agents": {"command": ["play", "--key", "sk-2"], "env": {"KEY": "sk-3"}},
    "autoscaling": {"policy": "steps", "actuator": "command", "command": ["scale", "sk-4"]},
}


def config_of(**changes: Any) -> Config:
    table = {name: value for name, value in TABLE.items() if name not in ("agents", "autoscaling")} | changes
    return parse_config(table, "run.toml")


def test_settings_for_hosts_have_no_paths_and_no_secrets() -> None:
    config = config_of(
        agents=TABLE["agents"],
        prompts=TABLE["prompts"] | {"environment": "agent"},
        rollout={"engine": "vllm", "vllm": {"hf_token": "sk-5", "enforce_eager": True}},
    )
    for each in (config, config_of()):
        text = tomli_w.dumps(settings_for_hosts(plain_table(each)))
        assert SECRET not in text
        assert "ada" not in text
        assert "sk-" not in text


def test_settings_for_hosts_give_the_same_topics_and_rollouts() -> None:
    config, found = config_of(), settings_for_hosts(plain_table(config_of()))
    own = {"relay": found["relay"] | {"token_file": "t", "certificate_file": "c", "authority_file": "a"}}
    joined = parse_config(found | own, "kafka")
    assert settings_for_hosts(found) == found
    for topic in CATALOGUE.values():
        assert partitions_of(joined, topic) == partitions_of(config, topic)
    assert joined.rollout.dtype == config.rollout.dtype == "bfloat16"
    assert joined.placement == config.placement
    assert (joined.relay.listen, joined.relay.port, joined.relay.object_store) == ("0.0.0.0", 99, "")
    names = [each.name for each in joined.rollout.environments]
    assert names == ["on-the-machine-of-the-run/maze.py:Maze", "calculator"]


@pytest.mark.parametrize(("place", "kept"), [("s3://bucket/copies", True), ("file:///mnt/copies", False)])
def test_settings_for_hosts_keep_object_stores_but_no_folders(place: str, kept: bool) -> None:
    found = settings_for_hosts(plain_table(parse_config({"relay": {"object_store": place}}, "run.toml")))
    assert found["relay"].get("object_store") == (place if kept else None)
    assert found["relay"]["listen"] == "127.0.0.1"


def test_publish_run_files_writes_settings_and_model(broker: Broker, run_id: str, tmp_path: Path) -> None:
    config = parse_config(
        {
            "run": {"name": run_id},
            "kafka": {"bootstrap_servers": broker.bootstrap_servers},
            "model": {"path": str(save_tiny_model(tmp_path / "model"))},
        },
        "run.toml",
    )
    publish_run_files(config)  # without the topic: the trainer goes on
    with admin_client(config.kafka.client()) as admin:
        create_topics(admin, [TopicSpec(RUN_FILES.name(run_id), 1)])
    publish_run_files(config)
    files = read_run_files(config.kafka.client(), run_id)
    assert files is not None
    assert {SETTINGS_FILE, "config.json"} <= files.keys()
    assert not any("safetensors" in name for name in files)
