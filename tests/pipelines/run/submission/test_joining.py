"""A role that joins by Kafka's address: settings and model files of the run, this host's own paths, clear errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from trainer_batches import save_tiny_model

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.run_files import write_run_files
from infra.models.config_files import is_without_weights, read_config_files
from pipelines.config import Config, ConfigError, parse_config, plain_table
from pipelines.roles import Role
from pipelines.run.preflight import missing_requirements
from pipelines.run.submission import joining
from pipelines.run.submission.joining import NotWritten, RunAddress, join_run
from pipelines.run.submission.role_checks import role_problems
from pipelines.run_files import SETTINGS_FILE, publish_run_files, settings_for_hosts
from schemas.topics import METRICS, RUN_FILES, Topic

TOKEN = "relay.token_file=token"


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a host that has a token and nothing else."""
    folder = tmp_path / "host"
    folder.mkdir()
    (folder / "token").write_text("ab" * 16)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(joining, "WAIT_S", 0.0)
    return folder


@pytest.fixture
def config(broker: Broker, run_id: str, tmp_path: Path) -> Config:
    table = {
        "run": {"name": run_id, "folder": str(tmp_path / "runs"), "seed": 7},
        "kafka": {"bootstrap_servers": broker.bootstrap_servers, "partitions": 2},
        "model": {"path": str(save_tiny_model(tmp_path / "model"))},
        "rollout": {"slots": 3},
    }
    return parse_config(table, "run.toml")


def make_topic(config: Config, topic: Topic = RUN_FILES) -> None:
    with admin_client(config.kafka.client()) as admin:
        create_topics(admin, [TopicSpec(topic.name(config.run.name), 1)])


def joined(config: Config, pipeline: str, *changes: str) -> Config:
    address = RunAddress.of(f"kafka://{config.kafka.bootstrap_servers}/{config.run.name}")
    assert address is not None
    return join_run(address, pipeline, changes).checked()


def test_rollout_joins_with_kafkas_address_and_a_token(config: Config, host: Path) -> None:
    make_topic(config)
    publish_run_files(config)
    found = joined(config, "rollout", TOKEN, "relay.store=store")
    assert (found.run.seed, found.rollout.slots, found.kafka.partitions) == (7, 3, 2)
    assert found.kafka.bootstrap_servers == config.kafka.bootstrap_servers
    assert (found.relay.token_file, found.relay.store) == ("token", "store")
    folder = found.model_folder()
    assert folder.parent == host / "runs" / config.run.name
    assert read_config_files(folder) == read_config_files(config.model_folder())
    assert is_without_weights(folder)
    assert list(role_problems(found, Role("rollout"))) == []
    assert list(missing_requirements(found, warm_start=False)) == []  # of a dry run
    assert (host / "runs" / "latest").resolve() == folder.parent
    assert joined(config, "rollout", TOKEN).model.path == str(folder)
    assert joined(config, "rollout", TOKEN, f"model.path={config.model.path}").model == config.model
    assert joined(config, "relay", TOKEN, "run.folder=other").model.path == ""
    assert sorted(each.name for each in host.iterdir()) == ["runs", "token"]


def test_join_names_the_token_and_files_that_a_host_lacks(config: Config) -> None:
    environment = {"name": "/home/ada/maze.py:Maze"}
    table = plain_table(config)
    changed = parse_config(table | {"rollout": table["rollout"] | {"environments": [environment]}}, "run.toml")
    make_topic(config)
    publish_run_files(changed)
    with pytest.raises(ConfigError) as raised:
        joined(config, "rollout")
    assert "relay.token_file is not set" in str(raised.value)
    assert "--set relay.token_file=FILE" in str(raised.value)
    assert "copy it here, and add --set rollout.environments.0.name=maze.py:Maze" in str(raised.value)
    own = "rollout.environments.0.name=maze.py:Maze"
    assert joined(config, "rollout", TOKEN, own).rollout.environments[0].name == "maze.py:Maze"
    assert joined(config, "relay", TOKEN).relay.token_file == "token"


def test_emulated_rollout_joins_with_the_address_alone(config: Config, host: Path) -> None:
    table = {"run": {"name": config.run.name}, "kafka": plain_table(config)["kafka"]}
    lengths = {"file": "/home/ada/lengths.jsonl"}
    emulated = {"engine": "emulated", "replicas": 2, "emulation": {"stride": 8}}
    make_topic(config)
    source = {"prompts": {"source": "synthetic"}}
    publish_run_files(parse_config(table | source | {"rollout": emulated}, "run.toml"))
    found = joined(config, "rollout")
    assert (found.rollout.replicas, found.rollout.emulation.stride) == (2, 8)
    assert list(missing_requirements(found, warm_start=False)) == []
    publish_run_files(parse_config(table | source | {"rollout": emulated | {"emulation": {"lengths": lengths}}}, "run"))
    with pytest.raises(ConfigError, match=r"add --set rollout\.emulation\.lengths\.file=lengths\.jsonl"):
        joined(config, "rollout")
    assert sorted(each.name for each in host.iterdir()) == ["token"]


def test_vllm_joins_with_a_model_folder_of_the_host_only(config: Config) -> None:
    make_topic(config)
    publish_run_files(dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, engine="vllm")))
    with pytest.raises(ConfigError, match=r"--set model\.path=FOLDER"):
        joined(config, "rollout", TOKEN)
    assert joined(config, "rollout", TOKEN, f"model.path={config.model.path}").rollout.engine == "vllm"


def test_runs_that_cannot_be_joined_are_told_apart(config: Config) -> None:
    make_topic(config, METRICS)
    with pytest.raises(ConfigError, match=r"has no topic .*run-files: it was started by an older release"):
        joined(config, "rollout", TOKEN)
    near = dataclasses.replace(config, run=dataclasses.replace(config.run, name=f"{config.run.name}x"))
    with pytest.raises(ConfigError, match=rf"there is no run '{near.run.name}' at .*; did you mean '"):
        joined(near, "rollout", TOKEN)
    make_topic(config)
    with pytest.raises(NotWritten, match="rank 0 of the trainer has not written"):
        joined(config, "rollout", TOKEN)
    with pytest.raises(ConfigError, match="score cannot join by Kafka's address, only rollout and relay"):
        joined(config, "score")


@pytest.mark.parametrize("text", ["kafka://host/run", "kafka://:9092/run", "kafka://a:1,b/run", "kafka://a:1/r n"])
def test_invalid_addresses_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an address of a run, kafka://HOST:PORT"):
        RunAddress.of(text)


def test_addresses_have_several_brokers_and_no_password() -> None:
    assert RunAddress.of("kafka://a:1,[::1]:2/first") == RunAddress("a:1,[::1]:2", "first")
    assert RunAddress.of("runs/first/config.toml") is None
    with pytest.raises(ConfigError, match=r"--set kafka\.client_properties=FILE"):
        RunAddress.of("kafka://ada:secret@kafka:9092/first")


def hostile(table: dict[str, Any], **sections: Any) -> dict[str, bytes]:
    return {SETTINGS_FILE: tomli_w.dumps(table | sections).encode()}


def test_settings_of_another_program_name_no_file_of_the_host(config: Config, host: Path) -> None:
    table = settings_for_hosts(plain_table(config))
    make_topic(config)
    files = hostile(
        table,
        run=table["run"] | {"folder": "/srv"},
        model={"path": "/srv/model"},
        kafka=table["kafka"] | {"client_properties": "/etc/passwd"},
        relay=table["relay"] | {"token_file": "/etc/passwd", "disk_folder": "/srv", "store": "/srv"},
        rollout=table["rollout"] | {"environments": [{"name": f"{host}/token.py:Evil"}]},
        agents={"command": ["rm"]},
    )
    write_run_files(config.kafka.client(), config.run.name, files)
    found = joined(config, "relay", TOKEN)
    assert found.run.folder == Path("runs")
    assert (found.model.path, found.kafka.client_properties, found.agents) == ("", "", None)
    assert (found.relay.token_file, found.relay.disk_folder, found.relay.store) == ("token", "", "auto")
    with pytest.raises(ConfigError, match=r"token\.py:Evil, a file of the run's machine"):
        joined(config, "rollout", TOKEN)


@pytest.mark.parametrize("text", [b"\xff", b"a = [", b"", b"[run]\nname = 3\n", b"#" * ((1 << 20) + 1)])
def test_settings_that_are_not_of_the_run_are_rejected(config: Config, text: bytes) -> None:
    make_topic(config)
    write_run_files(config.kafka.client(), config.run.name, {SETTINGS_FILE: text})
    with pytest.raises(ConfigError, match="the run's settings in Kafka are not valid"):
        joined(config, "relay", TOKEN)
